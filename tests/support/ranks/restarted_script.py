"""User script under torchrun: a job whose rank 0 is killed at its n-th record in the first attempt."""

import os
import signal
import sys

import torch

import paceline as pl
from tiny_counting import BATCH, counting_job
from tiny_jobs import tiny_job

EPOCHS = 2
SAMPLES = 100 * BATCH
JOBS = {
    "loss": (tiny_job, {"protocol": "bsp", "stop": "updates=150"}),
    "counting": (lambda: counting_job(SAMPLES), {"protocol": "k_async(k=2)", "stop": f"epochs={EPOCHS}"}),
}


class Kill(pl.callbacks.Callback):
    """Callback that kills this process at its n-th record."""

    def __init__(self, last):
        self._left = last

    def on_record(self, record):
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def train(name, cluster, seed, **options):
    job, asked = JOBS[name]
    return pl.train(job(), cluster=cluster, seed=seed, checkpoint_every="updates=10", **asked, **options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, last = sys.argv[1:]
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    slowness = pl.Cluster(2, timing=pl.timing.Deterministic(0.002))
    train(name, pl.Torchrun(slowness=slowness), 0, out="run", callbacks=[Kill(int(last) if is_first else -1)])
