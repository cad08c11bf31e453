"""Script of ranks that sum their gradients, one of which is killed once: protocol, folder, draw at which it is."""

import os
import sys
from pathlib import Path

import torch

import paceline as pl
from tiny_jobs import tiny_job

UPDATES = 24


def job():
    return tiny_job(sampling="epoch", optimizer=torch.optim.Adam)


if __name__ == "__main__":
    torch.set_num_threads(1)
    protocol, folder, draw = sys.argv[1:]
    begun = Path(f"{folder}.{os.environ['RANK']}")
    faults = [pl.Fault(worker=1, draw=int(draw))] if int(draw) and not begun.exists() else []
    begun.touch()
    pl.train(
        job(),
        protocol=protocol,
        cluster=pl.Torchrun(server=False, faults=faults),
        stop=f"updates={UPDATES}",
        checkpoint_every="updates=5",
        out=folder,
        seed=1,
    )
