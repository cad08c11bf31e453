"""Script of ranks that sum their gradients: protocol, folder, and the gradient at which rank 1 is killed, once."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline as pl
from tiny_jobs import tiny_job

UPDATES = 24
left = [0]  # gradients until this rank is killed; 0 for never


def loss(output, target):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(output, target)


def job():
    return tiny_job(sampling="epoch", optimizer=torch.optim.Adam, loss=loss)


if __name__ == "__main__":
    torch.set_num_threads(1)
    protocol, folder, killed_at = sys.argv[1:]
    begun = Path(f"{folder}.{os.environ['RANK']}")
    if os.environ["RANK"] == "1" and not begun.exists():
        left[0] = int(killed_at)
    begun.touch()
    stop = f"updates={UPDATES}"
    cluster = pl.Torchrun(server=False)
    pl.train(job(), protocol=protocol, cluster=cluster, stop=stop, checkpoint_every="updates=5", out=folder, seed=1)
