"""LoRA of SmolLM2-135M, sharded over two ranks by `fully_shard`: groups of two ranks as workers, or HSDP of torch.

Start it with `paceline run --nproc-per-node 4 train_sharded.py`. Only `train_attached` and `train_hsdp` differ.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from data import load_model, load_tokens, prepare, sequences
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline as pl

GROUP, SEQUENCES, BATCH = 2, 96, 2  # ranks of a group; sequences of the training, and of a batch


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protocol", default="balanced(m=2)", help="protocol of paceline; hsdp for HSDP of torch")
    parser.add_argument("--step-s", type=float, default=0.0, help="least seconds of a batch")
    parser.add_argument("--slow-factor", type=float, default=2.0, help="of the last group")
    parser.add_argument("--epochs", type=int, default=1)
    return parser.parse_args()


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Shard the layers of the model, and the rest, which has its tied embedding."""
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, least_s: float) -> float:
    """Make a step that lasts at least a number of seconds for each sequence; return the loss."""
    begun_s = time.monotonic()
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    time.sleep(max(0.0, len(tokens) / BATCH * least_s + begun_s - time.monotonic()))
    optimizer.step()
    return float(loss)


def train_attached(model: Any, mesh: DeviceMesh, data: TensorDataset, given: argparse.Namespace, least_s: float) -> int:
    """Train groups of ranks by a protocol of paceline; return the updates."""
    shard(model, mesh["shard"])
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-3)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
    run = pl.attach(model, optimizer, loader, protocol=given.protocol)
    for _ in run.epochs(given.epochs):
        for (tokens,) in run.loader:
            loss = step(model, optimizer, tokens, least_s)
            if run.stepped and dist.get_rank() == 0:
                print(f"update {run.update}: loss {loss:.3f}", flush=True)
    return run.update


def train_hsdp(model: Any, mesh: DeviceMesh, data: TensorDataset, given: argparse.Namespace, least_s: float) -> int:
    """Train under HSDP; return the updates."""
    shard(model, mesh)
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-3)
    sampler: DistributedSampler[int] = DistributedSampler(data, drop_last=True)
    updates = 0
    for epoch in range(given.epochs):
        sampler.set_epoch(epoch)
        for (tokens,) in DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True):
            loss = step(model, optimizer, tokens, least_s)
            updates += 1
            if dist.get_rank() == 0:
                print(f"update {updates}: loss {loss:.3f}", flush=True)
    return updates


def main() -> None:
    """Train."""
    given = options()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        prepare()
    dist.barrier()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (ranks // GROUP, GROUP), mesh_dim_names=("replicate", "shard"))
    data = TensorDataset(torch.tensor(sequences(load_tokens(), SEQUENCES, seed=0)))
    least_s = given.step_s * (given.slow_factor if rank >= ranks - GROUP else 1.0)
    begun_s = time.monotonic()
    train = train_hsdp if given.protocol == "hsdp" else train_attached
    updates = train(load_model(), mesh, data, given, least_s)
    if rank == 0:
        print(f"{updates} updates in {time.monotonic() - begun_s:.0f} s", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # the end of a gloo group may wait for processes that have ended
