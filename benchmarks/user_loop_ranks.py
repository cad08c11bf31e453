"""One rank that `user_loop.py` measures: a loop under DistributedDataParallel, or attached.

Called with its settings as JSON under torchrun; every rank prints its answer as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline as pl
from distributed_ranks import ANSWER

Settings = dict[str, Any]
BATCH = 4
WARM_UP = 5
ended_s: list[float] = []  # processor seconds of this process at the end of each step


class Sleep(nn.Module):
    """Layer that takes a time, and computes nothing."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x


class Wide(nn.Module):
    """Model with a million parameters whose gradient costs little, after some layers that take the time of a step."""

    def __init__(self, parameters: int, layers: int, tensors: int = 20) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Sleep() for _ in range(layers)))
        self.parts = nn.ParameterList(torch.zeros(parameters // tensors) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return torch.stack([part.sum() for part in self.parts]).sum() * x.mean()


def main() -> None:
    settings = json.loads(sys.argv[1])
    begun_s = time.time()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = TensorDataset(torch.ones(BATCH * ranks * settings["steps"], 1))
    model = Wide(settings["parameters"], settings.get("layers", 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    plain_s = plain_processor_s(settings)
    ended_s.clear()
    times_s = (attached if settings["protocol"] else ddp)(
        model, optimizer, data, settings, compute_times(settings, rank)
    )
    more_s = mean_step_s() - plain_s
    answer = {"rank": rank, "times_s": times_s, "begun_s": begun_s, "more_processor_s": more_s}
    print(ANSWER + json.dumps(answer), flush=True)
    os._exit(0)  # the end of a gloo group may wait for processes that have ended


def plain_processor_s(settings: Settings) -> float:
    """Return the processor seconds of a step of the loop alone."""
    model = Wide(settings["parameters"], settings.get("layers", 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(WARM_UP + 50):
        step(model, optimizer, torch.ones(BATCH, 1), 0.0)
    return mean_step_s()


def mean_step_s() -> float:
    """Return the processor seconds of a step after the warm-up."""
    timed_s = ended_s[WARM_UP:]
    return (timed_s[-1] - timed_s[0]) / max(1, len(timed_s) - 1)


def compute_times(settings: dict[str, Any], rank: int) -> Iterator[float]:
    """Yield the seconds of computing of each step of a rank."""
    usual_s: float = settings["compute_s"][rank]
    for index in itertools.count():
        match settings.get("pattern"):
            case "random":  # half of the time is constant
                yield usual_s * (0.5 + 0.5 * np.random.default_rng([rank, index]).exponential())
            case "transient":  # three times as long for ten steps in a row, a fifth of the time
                yield usual_s * (3 if np.random.default_rng([rank, index // 10]).random() < 0.2 else 1)
            case _:
                yield usual_s


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, compute_s: float) -> None:
    Sleep.seconds = compute_s / sum(isinstance(each, Sleep) for each in model.modules())
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
    ended_s.append(time.process_time())


def attached(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: TensorDataset,
    settings: dict[str, Any],
    compute_s: Iterator[float],
) -> list[float]:
    """Return when each step of this rank ended."""
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    given = {name: settings[name] for name in ("shards", "standby", "share_memory") if name in settings}
    cluster = pl.Torchrun(encrypt=settings["encrypt"], server=settings.get("server", True), **given)
    dying_step = settings.get("dying_step") if os.environ["RANK"] == "0" else None
    run = pl.attach(model, optimizer, loader, protocol=settings["protocol"], cluster=cluster, out=settings.get("out"))
    times_s = []
    for _ in run.epochs(1):
        for (x,) in run.loader:
            with run.minibatch():
                step(model, optimizer, x, next(compute_s))
                times_s.append(time.time())
            if len(times_s) == dying_step:
                os.kill(os.getpid(), signal.SIGKILL)
    return times_s


def ddp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: TensorDataset,
    settings: dict[str, Any],
    compute_s: Iterator[float],
) -> list[float]:
    """Return when each step of this rank ended."""
    torch.distributed.init_process_group("gloo")
    parallel = DistributedDataParallel(model)
    times_s = []
    for (x,) in DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data)):
        step(parallel, optimizer, x, next(compute_s))
        times_s.append(time.time())
    return times_s


if __name__ == "__main__":
    main()
