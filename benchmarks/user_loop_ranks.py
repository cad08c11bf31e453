"""One rank that `user_loop.py` measures: a loop under DistributedDataParallel, or attached.

Called with its settings as JSON under torchrun; every rank prints its answer as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline as pl
from distributed_ranks import ANSWER

BATCH = 4
WARM_UP = 5


class Wide(nn.Module):
    """Model with a million parameters whose gradient costs little."""

    def __init__(self, parameters: int, tensors: int = 20) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(parameters // tensors) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum() * x.mean()


def main() -> None:
    settings = json.loads(sys.argv[1])
    begun_s = time.time()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = TensorDataset(torch.ones(BATCH * ranks * settings["steps"], 1))
    model = Wide(settings["parameters"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    times_s = (attached if settings["protocol"] else ddp)(model, optimizer, data, settings, settings["compute_s"][rank])
    print(ANSWER + json.dumps({"rank": rank, "times_s": times_s, "begun_s": begun_s}), flush=True)
    os._exit(0)  # the end of a gloo group may wait for processes that have ended


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, compute_s: float) -> None:
    optimizer.zero_grad()
    time.sleep(compute_s)
    model(x).backward()
    optimizer.step()


def attached(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, settings: dict[str, Any], compute_s: float
) -> list[float]:
    """Return when each step of this rank ended."""
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    run = pl.attach(model, optimizer, loader, protocol=settings["protocol"])
    times_s = []
    for _ in run.epochs(1):
        for (x,) in run.loader:
            step(model, optimizer, x, compute_s)
            times_s.append(time.time())
    return times_s


def ddp(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, settings: dict[str, Any], compute_s: float
) -> list[float]:
    """Return when each step of this rank ended."""
    torch.distributed.init_process_group("gloo")
    parallel = DistributedDataParallel(model)
    times_s = []
    for (x,) in DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data)):
        step(parallel, optimizer, x, compute_s)
        times_s.append(time.time())
    return times_s


if __name__ == "__main__":
    main()
