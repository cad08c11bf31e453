"""Simulated run with all parts that have a state; it can kill itself at its n-th function call."""

import os
import signal
import sys
from functools import partial

import torch

import paceline as pl
from tiny_controllers import RandomWalk
from tiny_jobs import batch_norm_net, dataset, tiny_job

N = 4


def train(**options):
    job = tiny_job(
        model=batch_norm_net,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        scheduler=partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[15, 45]),
        sampling="epoch",
        sharding="partitioned",
        batch_size=4,
        data=dataset(),
        eval_data=dataset(),
    )
    straggling = pl.timing.Transient(mean_on_s=3, mean_off_s=5, slowdown=4)
    walk = pl.k_batch_async(k=1).controlled_by(RandomWalk(3, N)).until(epochs=2)
    return pl.train(
        job,
        protocol=pl.k_sync(k=2).until(epochs=1) >> walk >> pl.k_batch_async(k=3),
        cluster=pl.Cluster(N, timing=pl.timing.Exponential(1.0), transient=straggling),
        stop="epochs=3",
        seed=11,
        evaluate_every="epochs=1",
        checkpoint_every="updates=4",
        **options,
    )


class Calls(pl.callbacks.Callback):
    """Callback that counts the function calls of a run from its first record, and ends the process at one of them."""

    def __init__(self, last=None):
        self.made = 0
        self._last = last

    def on_record(self, record):
        if not self.made:
            sys.setprofile(self._count)

    def _count(self, frame, what, argument):
        self.made += what == "call"
        if self.made == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, at_call = sys.argv[1:]
    calls = Calls(int(at_call))
    train(out=folder, callbacks=[calls])
    sys.setprofile(None)
    print(calls.made)
