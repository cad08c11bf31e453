"""One rank that `gpu.py` measures: ResNet-18 on a GPU that all ranks share, under DistributedDataParallel or attached.

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
from paceline.jobs.models.resnet import resnet18

Settings = dict[str, Any]
Step = tuple[float, int]  # when a step ended, and the updates until then
BATCH = int(os.environ.get("BATCH", "64"))
DEVICE = os.environ.get("DEVICE", "cuda")


def main() -> None:
    settings: Settings = json.loads(sys.argv[1])
    torch.manual_seed(0)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH * ranks * settings["steps"], 3, 32, 32, generator=generator)
    data = TensorDataset(images, torch.randint(10, (len(images),), generator=generator))
    model = resnet18().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    delay_s = settings["delay_s"] if rank == ranks - 1 else 0.0
    train = attached if settings["protocol"] else ddp
    steps = train(model, optimizer, data, settings, delay_s)
    print(ANSWER + json.dumps({"rank": rank, "steps": steps}), flush=True)
    os._exit(0)  # the end of a gloo group may wait for processes that have ended


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], delay_s: float, autocast: bool
) -> float:
    """Make one step, and return when the GPU has ended it.

    Args:
        delay_s: seconds that this rank sleeps for each `BATCH` samples.
    """
    images, labels = (each.to(DEVICE) for each in batch)
    time.sleep(delay_s * len(images) / BATCH)
    optimizer.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    loss.item()
    return time.time()


def attached(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, settings: Settings, delay_s: float
) -> list[Step]:
    """Return the steps of this rank."""
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    cluster = pl.Torchrun(**settings["cluster"])
    run = pl.attach(model, optimizer, loader, protocol=settings["protocol"], cluster=cluster)
    autocast = settings["autocast"]
    batches = (batch for _ in run.epochs(1) for batch in run.loader)
    return [(step(model, optimizer, batch, delay_s, autocast), run.update) for batch in batches]


def ddp(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, settings: Settings, delay_s: float
) -> list[Step]:
    """Return the steps of this rank."""
    torch.distributed.init_process_group("gloo")
    parallel = DistributedDataParallel(model)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    autocast = settings["autocast"]
    return [(step(parallel, optimizer, batch, delay_s, autocast), number) for number, batch in enumerate(loader, 1)]


if __name__ == "__main__":
    main()
