"""User's script: a loop that is attached, and then the same batches under DistributedDataParallel.

Argument: settings as JSON. Each rank prints its answer as one line of JSON.
"""

import copy
import json
import os
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

alive = []  # the end of a gloo group may wait for processes that have ended
SAMPLES, FEATURES, CLASSES = 96, 10, 3


class Network(nn.Module):
    """Network with batch norm, a tied weight and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.last = nn.Linear(FEATURES, CLASSES)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.last(torch.tanh(self.second(self.norm(self.first(x)))))


class Lion(torch.optim.Optimizer):
    """Optimizer of the script, which a process without its code cannot step."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    change = momentum.mul(first).add_(parameter.grad, alpha=1 - first)
                    parameter.add_(change / (change.abs() + 1e-3), alpha=-group["lr"])  # a smooth sign
                    momentum.mul_(second).add_(parameter.grad, alpha=1 - second)


def make_optimizer(model, kind):
    if kind == "Lion":
        return Lion(model.parameters())
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    if kind == "AdamW":
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    return torch.optim.SGD([{"params": decayed, "lr": 0.05}, {"params": others}], lr=0.1, momentum=0.9)


def step(model, optimizer, batches, accumulate):
    optimizer.zero_grad()
    for x, y in batches:
        (cross_entropy(model(x), y) / accumulate).backward()
    optimizer.step()


def main(settings):
    torch.manual_seed(0)
    rank, accumulate = int(os.environ["RANK"]), settings.get("accumulate", 1)
    data = TensorDataset(torch.randn(SAMPLES, FEATURES).double(), torch.randint(0, CLASSES, (SAMPLES,)))
    model = Network().double()
    reference = copy.deepcopy(model)
    optimizer = make_optimizer(model, settings["optimizer"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = DataLoader(data, batch_size=8 // accumulate, shuffle=True)
    arguments = settings.get("attach", {"protocol": "bsp"})
    run = pl.attach(
        model,
        optimizer,
        loader,
        scheduler=scheduler,
        accumulate=accumulate,
        cluster=pl.Torchrun(**settings.get("cluster", {})),
        **arguments,
    )
    steps, batches = [], []
    for epoch in run.epochs(settings.get("epochs", 3)):
        for batch in run.loader:
            batches.append(batch)
            if len(batches) < accumulate:
                continue
            step(model, optimizer, batches, accumulate)
            scheduler.step()
            steps.append((epoch, batches))
            batches = []
    answer = {"rank": rank, "steps": len(steps), "over": run.over, "stopped_by": run.stopped_by}
    answer["samples"] = [int(i) for _, done in steps for x, _ in done for i in numbers_of(x, data)]
    answer["states"] = len(optimizer.state)
    if settings.get("compare"):
        answer["difference"] = difference_from_ddp(model, reference, [done for _, done in steps], settings)
    os.write(1, f"ANSWER {json.dumps(answer)}\n".encode())  # in one piece: other ranks write too


def numbers_of(x, data):
    return [(data.tensors[0] == row).all(1).nonzero()[0, 0] for row in x]


def difference_from_ddp(model, reference, steps, settings):
    """Return the largest difference of a parameter from that of DistributedDataParallel on the same batches."""
    torch.distributed.init_process_group("gloo")
    parallel = DistributedDataParallel(reference, find_unused_parameters=True)
    alive.append(parallel)
    optimizer = make_optimizer(reference, settings["optimizer"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    accumulate = settings.get("accumulate", 1)
    for batches in steps:
        optimizer.zero_grad()
        with parallel.no_sync():
            for x, y in batches[:-1]:
                (cross_entropy(parallel(x), y) / accumulate).backward()
        x, y = batches[-1]
        (cross_entropy(parallel(x), y) / accumulate).backward()
        optimizer.step()
        scheduler.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    os._exit(0)
