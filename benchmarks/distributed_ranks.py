"""One rank of a job that `distributed.py` measures: paceline, DistributedDataParallel or bare gloo.

Called with the name of a contender and its settings as JSON; every rank prints its answer as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline as pl
from common import Stopwatch
from paceline.core.records import GradientArrived, Record, RunResumed, UpdateMade, WorkerJoined, WorkerLost
from paceline.engines.distributed.transport.buckets import Bucket
from paceline.recording.callback import Callback
from paceline.worker.replica import Replica

ANSWER = "answer: "
LR = 1e-3


def main() -> None:
    torch.set_num_threads(1)
    contender, settings = sys.argv[1], json.loads(sys.argv[2])
    print(ANSWER + json.dumps(CONTENDERS[contender](settings)), flush=True)


# --- moving parameters -----------------------------------------------------------------------------------------------


class Idle(nn.Module):
    """Model with nearly all parameters in one or several vectors that the loss does not depend on."""

    def __init__(self, parameters: int, tensors: int = 1) -> None:
        super().__init__()
        self.unused = nn.ParameterList(torch.ones((parameters - 1) // tensors) for _ in range(tensors))
        self.used = nn.Parameter(torch.zeros(1))


def touch_one_parameter(model: nn.Module, batch: object) -> Tensor:
    assert isinstance(model, Idle)
    return model.used.sum()


def step_one_parameter(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of the used parameter alone: an update only moves the others."""
    return torch.optim.SGD(list(parameters)[-1:], lr=LR)


def move_ours(settings: dict[str, Any]) -> float:
    """Return the seconds between two updates; on a worker, the seconds of its replica for a gradient.

    The difference is the time of publish, push, and the rest of the engine and the server.
    """
    watch = Stopwatch()
    watch.time(Replica, "gradient")
    job = pl.Job(
        model=partial(Idle, settings["parameters"], settings.get("tensors", 1)),
        optimizer=step_one_parameter,
        data=TensorDataset(torch.zeros(1)),
        batch_size=1,
        step=touch_one_parameter,
    )
    updates: int = settings["updates"]
    cluster = pl.Torchrun(threads=1, **settings.get("torchrun", {}))
    end = pl.train(job, protocol=pl.bsp(), cluster=cluster, stop=pl.Stop(updates=updates + warm_up(updates)))
    if os.environ["RANK"] != "0":
        return watch.s / (updates + warm_up(updates))
    times_s: list[float] = [update.now_s for update in end.history.of(UpdateMade)][-updates - 1 :]
    return (times_s[-1] - times_s[0]) / updates


def move_by_gloo(settings: dict[str, Any]) -> float:
    """Return the seconds to send a vector and to receive one of the same size."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    updates: int = settings["updates"]
    vector, gradient = torch.ones(settings["parameters"]), torch.ones(settings["parameters"])
    begun = 0.0
    for update in range(warm_up(updates) + updates):
        if update == warm_up(updates):
            begun = time.perf_counter()
        if rank == 0:
            dist.send(vector, 1)
            dist.recv(gradient, 1)
        else:
            dist.recv(vector, 0)
            dist.send(gradient, 0)
    took_s = time.perf_counter() - begun
    dist.destroy_process_group()
    return took_s / updates


def warm_up(updates: int) -> int:
    """Return the number of updates before the timed ones."""
    return max(5, updates // 10)


# --- sending during the backward pass --------------------------------------------------------------------------------


def train_resnet(settings: dict[str, Any]) -> float:
    """Return the seconds between two updates; on a worker, the seconds of its replica for a gradient."""
    if not settings["in_pieces"]:
        patch("paceline.engines.distributed.transport.wire_format.make_buckets", as_a_whole).start()
    watch = Stopwatch()
    watch.time(Replica, "gradient")
    images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    job = pl.Job(
        model=pl.jobs.resnet18,
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=LR),
        data=TensorDataset(images, torch.arange(64) % 10),
        batch_size=settings.get("batch_size", 16),
    )
    updates: int = settings["updates"]
    cluster = pl.Torchrun(threads=1, address=settings["address"], wire=settings.get("wire", "float32"))
    end = pl.train(job, protocol=pl.bsp(), cluster=cluster, stop=pl.Stop(updates=updates + warm_up(updates)))
    if os.environ["RANK"] != "0":
        return watch.s / (updates + warm_up(updates))
    times_s: list[float] = [update.now_s for update in end.history.of(UpdateMade)][-updates - 1 :]
    return (times_s[-1] - times_s[0]) / updates


def as_a_whole(gradient_nbytes: int, nbytes: int, bucket_nbytes: int = 0) -> list[Bucket]:
    return [Bucket(0, nbytes)]


# --- training with emulated compute ----------------------------------------------------------------------------------


def make_model(width: int = 500) -> nn.Module:
    """Return four layers, with a million parameters in total for a width of 500."""
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)])


def make_data(width: int = 500) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(64, width, generator=generator), torch.randn(64, width, generator=generator))


class Clock(Callback):
    """Callback that records times on the clock that all processes of this machine share."""

    def __init__(self) -> None:
        self.updates: list[tuple[float, int, int]] = []  # at_s, version, k
        self.computed: list[tuple[int, float]] = []  # worker and compute_s of each used gradient
        self.losses: list[float] = []
        self.joins: list[float] = []
        self.used_after_join: list[float] = []
        self.resumed: list[int] = []  # versions
        self._joined: int | None = None

    def on_record(self, record: Record) -> None:
        """Record the time."""
        at_s = time.monotonic()
        match record:
            case UpdateMade():
                self.updates.append((at_s, record.version, record.k))
            case RunResumed(version=version):
                self.resumed.append(version)
            case WorkerLost():
                self.losses.append(at_s)
            case WorkerJoined():
                self.joins.append(at_s)
                self._joined = record.worker
            case GradientArrived(used=True):
                self.computed.append((record.worker, record.compute_s))
                if record.worker == self._joined:
                    self.used_after_join.append(at_s)
                    self._joined = None


def train_ours(settings: dict[str, Any]) -> dict[str, Any]:
    scripted = [] if os.environ.get("IS_BACK") else settings["faults"]
    faults = [pl.Fault(worker=worker, draw=draw) for worker, draw in scripted]
    return vars(train_on(settings, faults=faults, **settings.get("torchrun", {})))


def train_on(settings: dict[str, Any], *callbacks: Callback, **torchrun: Any) -> Clock:
    """Train on ranks with these arguments of `pl.Torchrun`, and return when this process saw what happened."""
    clock = Clock()
    sleeps = [pl.timing.Deterministic(each) for each in settings["compute_s"]]
    slowness = pl.Cluster(len(sleeps), timing=sleeps)
    width = settings.get("width", 500)
    pl.train(
        pl.Job(
            model=partial(make_model, width),
            loss=F.mse_loss,
            optimizer=partial(torch.optim.SGD, lr=LR),
            data=make_data(width),
            batch_size=settings.get("batch_size", 1),
        ),
        protocol=settings["protocol"],
        cluster=pl.Torchrun(threads=1, slowness=slowness, encrypt=settings["encrypt"], **torchrun),
        stop=pl.Stop(updates=settings["updates"]),
        callbacks=[clock, *callbacks],
    )
    return clock


def tokens() -> Tensor:
    """Return log-normal lengths of the samples of `make_data`, with sigma 0.8."""
    return torch.empty(64).log_normal_(4.0, 0.8, generator=torch.Generator().manual_seed(1)).ceil()


def step_by_tokens(model: nn.Module, batch: Any, token_s: float) -> Tensor:
    """Sleep in proportion to the tokens of a batch, and return its mean over tokens."""
    inputs, targets, count = batch
    time.sleep(float(count.sum()) * token_s)
    each = F.mse_loss(model(inputs), targets, reduction="none").mean(1)
    mean: Tensor = (each * count).sum() / count.sum()
    return mean


def tokens_of(batch: Any) -> Tensor:
    total: Tensor = batch[2].sum()
    return total


def train_lengths(settings: dict[str, Any]) -> dict[str, Any]:
    """Train without a server on samples of unequal length, weighed by their tokens."""
    clock = Clock()
    job = pl.Job(
        model=make_model,
        step=partial(step_by_tokens, token_s=settings["token_s"]),
        weight=tokens_of,
        optimizer=partial(torch.optim.SGD, lr=LR),
        data=TensorDataset(*make_data().tensors, tokens()),
        batch_size=settings["batch_size"],
    )
    cluster = pl.Torchrun(threads=1, server=False)
    stop = pl.Stop(updates=settings["updates"])
    pl.train(job, protocol=settings["protocol"], cluster=cluster, stop=stop, callbacks=[clock])
    return vars(clock)


def train_ddp(settings: dict[str, Any]) -> dict[str, Any]:
    """Train with DDP, and report how the run ends when one of its ranks is killed."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    width, batch_size = settings.get("width", 500), settings.get("batch_size", 1)
    model = DistributedDataParallel(make_model(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    inputs, targets = make_data(width).tensors
    lengths, token_s = tokens(), settings.get("token_s", 0.0)
    order = torch.Generator().manual_seed(rank)
    updates: list[tuple[float, int, int]] = []
    for update in range(1, settings["updates"] + 1):
        if [rank, update] in settings.get("faults", []):
            os.kill(os.getpid(), signal.SIGKILL)
        sample = torch.randint(len(inputs), (batch_size,), generator=order)
        time.sleep(float(lengths[sample].sum()) * token_s if token_s else settings["compute_s"][rank])
        optimizer.zero_grad()
        try:
            F.mse_loss(model(inputs[sample]), targets[sample]).backward()
        except RuntimeError as error:
            said = str(error).partition("] ")[2].partition(". This")[0]
            return {"updates": updates, "error": f"{type(error).__name__}: {said}", "error_s": time.monotonic()}
        optimizer.step()
        updates.append((time.monotonic(), update, dist.get_world_size()))
    dist.destroy_process_group()
    return {"updates": updates}


CONTENDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "move_ours": move_ours,
    "move_by_gloo": move_by_gloo,
    "train_resnet": train_resnet,
    "train_ours": train_ours,
    "train_lengths": train_lengths,
    "train_ddp": train_ddp,
}

if __name__ == "__main__":
    main()
