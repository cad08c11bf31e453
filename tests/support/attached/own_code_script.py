"""User's script: an attached loop with an optimizer, a callback and a compensator of its own main module.

Arguments: protocol, cluster, and the file of the callback.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.policies.compensation.base import Compensator

HALF = 0.5


@dataclass(frozen=True)
class Halving(Compensator):
    """Factor 1/2 of each stale gradient."""

    name = "halving"
    kind = "scale"
    formula = "1/2"

    def compensate(self, stale, memory):
        return HALF


class SignSGD(torch.optim.Optimizer):
    """Steps by the signs of the gradients."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


class Noting(pl.callbacks.Callback):
    """Writes each update, the process in which it was called, and whether that has imported torch's compiler."""

    def __init__(self, path):
        self.path = path

    def on_update(self, update):
        with self.path.open("a") as file:
            print(os.getppid(), update.version, "torch._dynamo" in sys.modules, file=file)


def main(protocol, cluster, path):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 5), torch.randn(64, 1))
    model = nn.Linear(5, 1)
    optimizer = SignSGD(model.parameters(), lr=0.25)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    plan = protocol if protocol != "own" else pl.asp() + Halving()
    callbacks = [Noting(Path(path))]
    loader = DataLoader(data, batch_size=8)
    run = pl.attach(model, optimizer, loader, protocol=plan, cluster=cluster, callbacks=callbacks, out="run")
    for _ in run.epochs(2):
        for x, y in run.loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    whole = 4 * model.weight.detach()
    assert torch.equal(whole, whole.round()), "each step is of 1/4"
    print(f"ANSWER {os.environ['RANK']} {os.getpid()} {run.stopped_by}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
