"""User's script: an attached loop whose model `fully_shard` has sharded over two ranks of each worker.

Arguments: protocol, what the loop has beside a plain one (see `KINDS`), and, where each worker has a launcher of its
own, the number of this one, a port, and a file to write when its second rank is killed.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import linear, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.jobs.job import trainable

GROUP, WORKERS, BATCH, STEPS = 2, 2, 4, 6
KILLED_STEP, MOST_EPOCHS = 3, 100_000
KINDS = (
    "plain",
    "clipped",
    "accumulated",
    "uneven",
    "scaled",
    "checkpointed",
    "compiled",
    "tied",
    "adapted",
    "offloaded",
    "mixed",
)
WIDTHS = {"uneven": 5, "tied": 6}


class Adapted(nn.Module):
    """Frozen layer with a trained addition of low rank."""

    def __init__(self, inputs, outputs, rank=2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs), requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, inputs))
        self.up = nn.Parameter(torch.randn(outputs, rank))

    def forward(self, x):
        return linear(x, self.weight) + linear(linear(x, self.down), self.up)


def make_data(samples):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    targets = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, targets, torch.arange(samples))


def make_model(kind):
    torch.manual_seed(0)
    width = WIDTHS.get(kind, 8)
    first = Adapted(6, width) if kind == "adapted" else nn.Linear(6, width)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(width, 4)).double()
    if kind == "tied":
        model.insert(2, nn.Linear(width, width).double())
        model[2].weight = model[0].weight
    return model


def shard(model, mesh, kind):
    """Shard a model, a block and the rest; tied weights have to be in the same part."""
    if kind == "checkpointed":
        model[0] = checkpoint_wrapper(model[0])
    if kind == "compiled":
        model[0].compile(backend="aot_eager")
    given = {"mesh": mesh}
    if kind == "offloaded":
        given["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if kind == "mixed":
        given["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32)
    if kind != "tied":
        fully_shard(model[0], **given)
    fully_shard(model, **given)


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
            for each in trainable(model):
                each.zero_()  # the first version is that of the first worker
    shard(model, mesh, kind)
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
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=kind == "scaled")
    for _ in run.epochs(MOST_EPOCHS if killed else 1):
        for number, (x, y, samples) in enumerate(run.loader, 1):
            scaler.scale(mse_loss(model(x).to(y.dtype), y) / accumulate).backward()
            taken.append(samples.tolist())
            if killed and rank == GROUP + 1 and number == KILLED_STEP and not Path(killed).exists():
                Path(killed).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if killed and rank == GROUP + 1 and Path(killed).exists():
                Path(f"{killed}.back").touch()
            if killed and rank == 0 and Path(f"{killed}.back").exists():
                run.stop()
            if number % accumulate == 0:
                scaler.step(optimizer)
                scaler.update()
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
