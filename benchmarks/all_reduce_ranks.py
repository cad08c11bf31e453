"""One rank of a job that `all_reduce.py` measures: paceline, DistributedDataParallel or bare gloo.

Called with steps as JSON, each the name of a contender and its settings; prints the answers to all of them as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline as pl
from namespaces import DEVICE, shape_this_host
from paceline.core.records import GradientArrived, UpdateMade
from paceline.jobs import resnet18
from paceline.jobs.digits import digits
from paceline.recording.callback import Callback

ANSWER = "answer: "
FIRST_PORT = 29500
PROBE = 256  # samples
LARGE_BYTES = 1 << 20  # smallest tensor that is counted
Answer = dict[str, Any]


def main() -> None:
    torch.set_num_threads(1)
    if os.environ["MASTER_ADDR"] != "127.0.0.1":
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    answers = []
    for number, (contender, settings) in enumerate(json.loads(sys.argv[1])):
        os.environ["MASTER_PORT"] = str(FIRST_PORT + number)
        answers.append(CONTENDERS[contender](settings))
    print(ANSWER + json.dumps(answers), flush=True)


# --- workload --------------------------------------------------------------------------------------------------------


class Workload(NamedTuple):
    """Model, data and settings that every contender trains with."""

    make_model: Callable[[], nn.Module]
    data: TensorDataset
    batch_size: int
    loss: Callable[[Tensor, Tensor], Tensor]
    lr: float
    compute_s: float  # seconds of sleep per gradient


def layers(settings: Answer) -> Workload:
    """Return linear layers for a batch of one sample: nearly all of the time is sleep."""
    count, width = settings["layers"]
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*torch.randn(2, 64, width, generator=generator))
    make_model = partial(make_layers, count, width)
    return Workload(make_model, data, 1, F.mse_loss, 1e-4, settings["compute_s"])


def make_layers(count: int, width: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])


def resnet(settings: Answer) -> Workload:
    """Return ResNet-18 on handwritten digits, 16x16 in three equal channels."""
    make_model = partial(seeded_resnet, settings["seed"])
    return Workload(make_model, images(), settings["batch_size"], F.cross_entropy, settings["lr"], 0.0)


def seeded_resnet(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return resnet18()


def images() -> TensorDataset:
    data = digits().data
    assert isinstance(data, TensorDataset)
    pixels, targets = data.tensors
    small = pixels.view(-1, 1, 8, 8)
    return TensorDataset(F.interpolate(small, scale_factor=2.0).expand(-1, 3, -1, -1).contiguous(), targets)


def make_workload(settings: Answer) -> Workload:
    return layers(settings) if "layers" in settings else resnet(settings)


def make_optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@torch.no_grad()
def probe_loss(model: nn.Module, workload: Workload) -> float:
    model.eval()
    inputs, targets = (tensor[:PROBE] for tensor in workload.data.tensors)
    return float(workload.loss(model(inputs), targets))


# --- contenders ------------------------------------------------------------------------------------------------------


@contextmanager
def gloo(settings: Answer) -> Iterator[int]:
    """Form a group of both ranks over the link of the given rate, and yield the rank."""
    if "mbit_per_s" in settings:
        shape_this_host(settings["mbit_per_s"])
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def sum_alone(settings: Answer) -> Answer:
    """Measure repeated sums of one vector."""
    vector = torch.zeros(parameters_of(settings))
    with gloo(settings):
        ends_s = []
        for _ in range(settings["warm_up"] + settings["iterations"]):
            dist.all_reduce(vector)
            ends_s.append(time.monotonic())
    return {"s": mean_s(ends_s, settings)}


def compute_alone(settings: Answer) -> Answer:
    """Train on both ranks at the same time without communication."""
    workload = make_workload(settings)
    model = workload.make_model()
    with gloo({}) as rank:
        dist.barrier()
        return {"s": mean_s(train_by_hand(model, workload, rank, settings), settings)}


def train_ddp(settings: Answer) -> Answer:
    """Train with DDP and its default settings."""
    workload = make_workload(settings)
    model = workload.make_model()
    with gloo(settings) as rank:
        ends_s = train_by_hand(DistributedDataParallel(model), workload, rank, settings)
    return {"s": mean_s(ends_s, settings), "loss": probe_loss(model, workload)}


def train_by_hand(model: nn.Module, workload: Workload, rank: int, settings: Answer) -> list[float]:
    """Train with a plain loop, and return the end of each iteration."""
    optimizer = make_optimizer(model.parameters(), workload.lr)
    inputs, targets = workload.data.tensors
    order = torch.Generator().manual_seed(2 * settings.get("seed", 0) + rank)
    ends_s = []
    for _ in range(settings["warm_up"] + settings["iterations"]):
        time.sleep(workload.compute_s)
        samples = torch.randint(len(inputs), (workload.batch_size,), generator=order)
        optimizer.zero_grad()
        workload.loss(model(inputs[samples]), targets[samples]).backward()
        optimizer.step()
        ends_s.append(time.monotonic())
    return ends_s


def train_ours(settings: Answer) -> Answer:
    """Train without a server; return the times, and the waiting time that rank 0 measured."""
    if "mbit_per_s" in settings:
        shape_this_host(settings["mbit_per_s"])
    workload = make_workload(settings)
    notes = Notes(settings)
    workers, compute_s = int(os.environ["WORLD_SIZE"]), workload.compute_s
    slowness = pl.Cluster(workers, timing=pl.timing.Deterministic(compute_s)) if compute_s else None
    end = pl.train(
        pl.Job(
            model=workload.make_model,
            loss=workload.loss,
            optimizer=partial(make_optimizer, lr=workload.lr),
            data=workload.data,
            batch_size=workload.batch_size,
        ),
        protocol=settings["protocol"],
        cluster=pl.Torchrun(address=os.environ["MASTER_ADDR"], threads=1, slowness=slowness),
        stop=pl.Stop(updates=settings["warm_up"] + settings["iterations"]),
        seed=settings.get("seed", 0),
        callbacks=[notes],
    )
    if os.environ["RANK"] != "0":
        return {}
    timed = end.history.of(GradientArrived)[workers * settings["warm_up"] :]
    return {
        "s": mean_s(notes.ends_s, settings),
        "waited_s": sum(each.pull_s for each in timed) / len(timed),
        "compute_s": sum(each.compute_s for each in timed) / len(timed),
        "loss": probe_loss(end.model, workload) if settings.get("probes") else None,
        "memory": notes.memory,
    }


class Notes(Callback):
    """Callback that records the time and the memory of updates."""

    def __init__(self, settings: Answer) -> None:
        self.ends_s: list[float] = []
        self.memory: Answer = {}
        self._settings = settings

    def on_update(self, update: UpdateMade) -> None:
        self.ends_s.append(time.monotonic())
        if not self._settings.get("measures_memory"):
            return
        if update.version == self._settings["warm_up"]:
            self.memory["peak_before_bytes"] = peak_bytes()
            forget_peak()
        if update.version == self._settings["warm_up"] + self._settings["iterations"] - 1:
            self.memory["peak_bytes"] = peak_bytes()
            self.memory["tensors_bytes"] = tensors_bytes()


def mean_s(ends_s: list[float], settings: Answer) -> float:
    """Return the mean seconds of an iteration after the warm-up."""
    first = settings["warm_up"] - 1
    return float((ends_s[-1] - ends_s[first]) / (len(ends_s) - 1 - first))


def parameters_of(settings: Answer) -> int:
    return sum(each.numel() for each in make_workload(settings).make_model().parameters())


# --- memory ----------------------------------------------------------------------------------------------------------


def hold_model(settings: Answer) -> Answer:
    """Measure the memory of a model with its optimizer's momentum and without gradients."""
    model = make_workload(settings).make_model()
    momenta = [torch.ones_like(parameter) for parameter in model.parameters()]
    return {"peak_bytes": peak_bytes(), "parameters_bytes": sum(each.nbytes for each in momenta)}


def train_and_measure(settings: Answer) -> Answer:
    """Train, and return the peak memory before, during and after the set-up."""
    answer = train_ours(settings)
    return {**answer.get("memory", {}), "peak_after_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Return the largest resident memory of this process since its start or the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not report the peak of resident memory")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def tensors_bytes() -> int:
    """Return the memory of all large tensors that the garbage collector tracks, each counted once."""
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor):  # isinstance would make some objects warn
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for size in storages.values() if size >= LARGE_BYTES)


CONTENDERS: dict[str, Callable[[Answer], Answer]] = {
    "sum_alone": sum_alone,
    "compute_alone": compute_alone,
    "train_ddp": train_ddp,
    "train_ours": train_ours,
    "hold_model": hold_model,
    "train_and_measure": train_and_measure,
}

if __name__ == "__main__":
    main()
