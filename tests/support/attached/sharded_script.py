"""User's script: an attached loop whose model `fully_shard` has sharded over two ranks of each worker.

Arguments: protocol, what the loop has beside a plain one (nothing, clipped, accumulated or uneven), and, where each
worker has a launcher of its own, the number of this one, a port, and a file to write when its second rank is killed.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

GROUP, WORKERS, BATCH, STEPS = 2, 2, 4, 6
KILLED_STEP, MOST_EPOCHS = 3, 100_000
WIDTH = {"uneven": 5}


def make_data(samples):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    targets = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, targets, torch.arange(samples))


def make_model(kind):
    torch.manual_seed(0)
    width = WIDTH.get(kind, 8)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4)).double()


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def main(protocol, kind, group=None, port=None, killed=None):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if group is None:
        mesh = init_device_mesh("cpu", (ranks // GROUP, GROUP), mesh_dim_names=("replicate", "shard"))["shard"]
        cluster = None
    else:
        mesh = init_device_mesh("cpu", (GROUP,))
        cluster = f"torchrun(groups={WORKERS},group={group},address=127.0.0.1:{port})"
        rank, ranks = rank + int(group) * GROUP, WORKERS * GROUP
    accumulate = 2 if kind == "accumulated" else 1
    data = make_data(BATCH * accumulate * ranks * STEPS)
    model = make_model(kind)
    if rank >= GROUP:
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()  # the first version is that of the first worker
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    clip_norm = 0.05 if kind == "clipped" else None
    run = pl.attach(
        model,
        optimizer,
        DataLoader(data, BATCH, shuffle=True),
        protocol=protocol,
        clip_norm=clip_norm,
        accumulate=accumulate,
        cluster=cluster,
        seed=0,
    )
    taken = []
    for _ in run.epochs(MOST_EPOCHS if killed else 1):
        for number, (x, y, samples) in enumerate(run.loader, 1):
            (mse_loss(model(x), y) / accumulate).backward()
            taken.append(samples.tolist())
            if killed and rank == GROUP + 1 and number == KILLED_STEP and not Path(killed).exists():
                Path(killed).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if killed and rank == GROUP + 1 and Path(killed).exists():
                Path(f"{killed}.back").touch()
            if killed and rank == 0 and Path(f"{killed}.back").exists():
                run.stop()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    whole = torch.cat([each.full_tensor().detach().reshape(-1) for each in model.parameters()])
    steps = [float(each["step"]) for each in optimizer.state.values()]
    answer = {"rank": rank, "taken": taken, "steps": steps, "parameters": whole.numpy().tobytes().hex()}
    print("ANSWER " + json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
