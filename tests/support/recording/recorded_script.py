"""Plain DDP training of one rank, in one of several ways; the last rank sleeps longer in its backward pass.

Called with the way; rank 0 prints the sum of the parameters at the end.
"""

import atexit
import contextlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

SHORT_S, LONG_S = 0.004, 0.034
STEPS = 40
KILLED_AT = 30


class SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Net(nn.Module):
    def __init__(self, way, seconds):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16) if way == "batch_norm" else nn.ReLU())
        self.last = nn.Linear(16, 4)
        self.way, self.seconds = way, seconds

    def forward(self, x):
        is_reentrant = self.way == "reentrant"
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=True) if is_reentrant else self.first(x)
        return self.last(hidden)


def main(way):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    seconds = LONG_S if rank == dist.get_world_size() - 1 else SHORT_S
    net = Net(way, seconds)
    if way == "compiled":
        net.compile(backend="aot_eager")
    model = DistributedDataParallel(net, static_graph=way == "static_graph", gradient_as_bucket_view=way == "views")
    used = torch.compile(model, backend="eager") if way == "compiled_outside" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=way == "scaled")
    torch.manual_seed(rank)
    for step in range(STEPS if way != "three_steps" else 3):
        optimizer.zero_grad()
        rounds = 2 if way == "no_sync" else 1
        for each in range(rounds):
            x = torch.randn(8, 16)
            with model.no_sync() if each < rounds - 1 else contextlib.nullcontext():
                loss = F.cross_entropy(SleepInBackward.apply(used(x), seconds), x[:, :4].detach().argmax(1))
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if way == "own_collectives":
            dist.all_reduce(loss.detach())
        if way == "killed" and step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        print(f"sum {sum(float(each.double().sum()) for each in model.parameters()):.12f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(0)  # torch aborts now and then as its process ends, with or without a recording
