"""User's script: an attached loop, in which rank 1 ends at its fifth step, the first time.

Argument: protocol.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

STEPS = 5
EPOCHS = 100  # more than rank 0 makes alone until torchrun ends it
BATCHES = 8  # of an epoch


def main():
    torch.manual_seed(0)
    points = torch.randn(64 * BATCHES, 16)
    data = TensorDataset(points, (points[:, 0] * points[:, 1] > 0).long())
    model = nn.Linear(16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    run = pl.attach(model, optimizer, loader, protocol=sys.argv[1], out="run", checkpoint_every="updates=1")
    is_first, rank, steps = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", os.environ["RANK"], 0
    for _ in run.epochs(EPOCHS):
        for x, y in run.loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
            if is_first and rank == "1" and steps == STEPS:
                os._exit(3)
    print(f"rank {rank}: {steps} steps, {run.stopped_by}", flush=True)


if __name__ == "__main__":
    main()
