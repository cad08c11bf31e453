"""Cost of choosing k: share of DBW's decisions and of measuring steps in the wall time of a run.

The MNIST run of `virtual_engine.py` under `dbw()`. The share is the time of the run in the controllers and in the step
meter. A difference of two runs would vary by 10 % on a shared machine.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import torch

import paceline as pl
from common import Stopwatch, options, report, spread
from paceline.policies.controllers.dbw import DBW
from paceline.policies.controllers.idle_workers import IdleWorkers
from paceline.server.step_stats import StepMeter
from virtual_engine import make_job, mnist_run

BAR = 0.01
SEED = 0


def main() -> None:
    args = mnist_run(options(__doc__ or "", rounds=7)).parse_args()
    torch.set_num_threads(args.threads)
    job = make_job(args.folder, args.batch_size)
    watch = Stopwatch()
    for kind, name in ((DBW, "decide"), (IdleWorkers, "decide"), (StepMeter, "before"), (StepMeter, "after")):
        watch.time(kind, name)
    run(job, args)  # warm-up round
    wall_s, shares = [], []
    for _ in range(args.rounds):
        watch.calls_s.clear()
        wall_s.append(run(job, args))
        shares.append(watch.s / wall_s[-1])
    share = spread(shares)
    report(
        "controller",
        args,
        {
            "bar": f"under {BAR:.0%} of the wall time",
            "data": job.name,
            "wall_s": spread(wall_s),
            "share": {**share, "meets_bar": share["median"] < BAR},
        },
    )


def run(job: pl.Job, args: argparse.Namespace) -> float:
    """Return the seconds of one run."""
    cluster = pl.Cluster(args.n, pl.timing.Exponential(mean_s=1.0))
    begun = perf_counter()
    pl.train(job, protocol=pl.dbw(), cluster=cluster, stop=pl.Stop(updates=args.updates), seed=SEED)
    return perf_counter() - begun


if __name__ == "__main__":
    main()
