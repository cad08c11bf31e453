"""What a user runs under torchrun without a server: one rank does not survive the first time."""

import os
import signal
import sys
from itertools import count

import torch
import torch.nn.functional as F

import paceline as pl
from tiny_jobs import tiny_job

UPDATES = 60
_gradients = count(1)


def loss(output, target):
    """Return the loss, or end this process, without a word."""
    rank, last = sys.argv[1:]
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first and os.environ["RANK"] == rank and next(_gradients) == int(last):
        os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(output, target)


if __name__ == "__main__":
    torch.set_num_threads(1)
    job, stop = tiny_job(loss=loss), pl.Stop(updates=UPDATES)
    pl.train(job, protocol="dc_s3gd", cluster=pl.Torchrun(), stop=stop, out="run", checkpoint_every="updates=10")
