"""One rank that `sharded.py` measures: a sharded model under HSDP of torch, or attached.

Called with its settings as JSON under torchrun; every rank prints its answer as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline as pl
from distributed_ranks import ANSWER
from paceline.jobs.local_shards import local_of

Settings = dict[str, Any]
GROUP, BATCH, LAYERS, INPUTS = 2, 24, 4, 8
WARM_UP = 5  # updates


class Block(nn.Module):
    """Residual block that takes a time for each sample."""

    seconds = 0.0  # of a sample

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(Block.seconds * len(x))
        added: Tensor = x + self.inner(x)
        return added


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // GROUP, GROUP), mesh_dim_names=("replicate", "shard"))
    is_slow = rank // GROUP == ranks // GROUP - 1
    Block.seconds = settings["compute_s"] * (settings["slow"] if is_slow else 1.0) / LAYERS / BATCH
    is_attached = bool(settings["protocol"])
    model = make_model(settings["parameters"], mesh["shard"] if is_attached else mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples = BATCH * ranks * (WARM_UP + settings["updates"])
    data = TensorDataset(torch.randn(samples, INPUTS), torch.randn(samples, 1))
    loop = attached if is_attached else hsdp
    seconds, made = loop(model, optimizer, data, settings)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    shard = sum(local_of(each).nbytes for each in model.parameters())
    answer = {"rank": rank, "seconds": seconds, "updates": made, "peak_bytes": peak, "shard_bytes": shard}
    print(ANSWER + json.dumps(answer), flush=True)
    os._exit(0)  # the end of a gloo group may wait for processes that have ended


def make_model(parameters: int, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    width = int((parameters / (2 * LAYERS)) ** 0.5)
    model = nn.Sequential(nn.Linear(INPUTS, width), *(Block(width) for _ in range(LAYERS)), nn.Linear(width, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def attached(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, settings: Settings
) -> tuple[float, int]:
    """Return the seconds between two updates that this rank has seen, and the updates between them."""
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    seen: list[tuple[float, int]] = []
    run = pl.attach(model, optimizer, loader, protocol=settings["protocol"], stop=f"updates={settings['updates']}")
    for _ in run.epochs(1_000):
        for x, y in run.loader:
            step(model, optimizer, x, y)
            seen.append((time.perf_counter(), run.update))
    timed = [each for each in seen if each[1] >= WARM_UP]
    return timed[-1][0] - timed[0][0], timed[-1][1] - timed[0][1]


def hsdp(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, settings: Settings
) -> tuple[float, int]:
    """Return the seconds of the steps after the first ones, and their number."""
    times_s = []
    for x, y in DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data)):
        step(model, optimizer, x, y)
        times_s.append(time.perf_counter())
    return times_s[-1] - times_s[WARM_UP], len(times_s) - 1 - WARM_UP


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()


if __name__ == "__main__":
    main()
