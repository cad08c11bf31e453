"""How well `advise` ranks protocols: its predictions from one recorded run against the training that they predict."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from scipy.stats import spearmanr

import paceline as pl
from common import options, report, rounded
from paceline.jobs.digits import TRAINING_SAMPLES

BAR = 0.9
CLUSTERS: dict[str, pl.Cluster] = {
    "8 exponential": pl.Cluster(8, pl.timing.Exponential(1.0)),
    "8 shifted exponential": pl.Cluster(8, pl.timing.ShiftedExponential(shift_s=0.6, mean_s=0.4)),
    "4, and 4 five times slower": pl.Cluster(
        8, pl.timing.ShiftedExponential(shift_s=0.8, mean_s=0.2), speed=[1.0] * 4 + [0.2] * 4
    ),
    "16 log-normal": pl.Cluster(16, pl.timing.LogNormal(median_s=1.0, sigma=1.0)),
    "8 Pareto": pl.Cluster(8, pl.timing.Pareto(scale_s=0.5, shape=2.5)),
    "8, transient": pl.Cluster(
        8, pl.timing.Gamma(shape=8, mean_s=1.0), transient=pl.timing.Transient(mean_on_s=5, mean_off_s=20, slowdown=5)
    ),
}


class Recorded(NamedTuple):
    """Recorded run: its job, cluster and protocol."""

    job: str
    cluster: str
    protocol: str


RUNS = [
    Recorded("softmax, B=1, near its floor", "8 exponential", "k_sync(k=4)"),
    Recorded("softmax, B=4", "16 log-normal", "k_async(k=4)"),
    Recorded("softmax, B=1, near its floor", "8, transient", "k_batch_async(k=4)"),
    Recorded("softmax, B=64", "4, and 4 five times slower", "bsp"),
    Recorded("softmax, B=64, proportional", "8 Pareto", "k_sync(k=6)"),
    Recorded("softmax, B=64", "8 shifted exponential", "k_batch_sync(k=4)"),
    Recorded("net, large rate", "8 exponential", "bsp"),
    Recorded("net, B=16", "8 Pareto", "k_async(k=2)"),
    Recorded("net, large rate", "4, and 4 five times slower", "k_batch_async(k=4)"),
    Recorded("net, momentum, B=32", "16 log-normal", "k_sync(k=8)"),
    Recorded("net, momentum, B=32", "8, transient", "k_batch_sync(k=8)"),
    Recorded("net, momentum, B=32", "8 shifted exponential", "bsp"),
]


def main() -> None:
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--updates", type=int, default=200, help="updates of a recorded run")
    parser.add_argument("--bound", type=int, default=5, help="limit on gradients, x recorded ones")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()

    with ProcessPoolExecutor(args.processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        measure = partial(compare, updates=args.updates, bound=args.bound, seeds=args.rounds)
        results = dict(zip((", ".join(run) for run in RUNS), pool.map(measure, RUNS), strict=True))
    correlations = [result["rank_correlation"] for result in results.values()]
    alone = [result["rank_correlation_of_seconds_per_update"] for result in results.values()]
    report(
        "advise",
        args,
        {
            "bar": f"rank correlation of at least {BAR}",
            "median": rounded(median(correlations)),
            "min": rounded(min(correlations)),
            "meets_bar": min(correlations) >= BAR,
            "of_seconds_per_update_alone": {"median": rounded(median(alone)), "min": rounded(min(alone))},
            "runs": results,
        },
        "scipy",
    )


def compare(run: Recorded, *, updates: int, bound: int, seeds: int) -> dict[str, Any]:
    """Record a run, predict the others from it, and train them."""
    warnings.simplefilter("ignore")
    job, cluster = JOBS[run.job](), CLUSTERS[run.cluster]
    with tempfile.TemporaryDirectory() as folder:
        recorded = pl.train(
            job,
            protocol=run.protocol,
            cluster=cluster,
            stop=pl.Stop(updates=updates),
            evaluate_every="updates=2",
            out=Path(folder) / "run",
            measure_steps=True,
        )
        advice = pl.advise(Path(folder) / "run")
        most = bound * recorded.history.totals.applied
    assert advice.seen is not None
    assert advice.auto is not None
    target = recorded.metrics["loss"]
    predicted, simulated = {}, {}
    for each in advice.ranking:
        times = [time_to(target, job, each.protocol, cluster, most, seed=1 + seed) for seed in range(seeds)]
        predicted[each.protocol] = each.seconds
        simulated[each.protocol] = mean(times)
    correlation = rank_correlation(list(predicted.values()), list(simulated.values()))
    by_update = [each.seconds_per_update for each in advice.ranking]
    best = min(simulated.values())
    return {
        "target": rounded(target),
        "rank_correlation": rounded(correlation),
        "rank_correlation_of_seconds_per_update": rounded(rank_correlation(by_update, list(simulated.values()))),
        "phi": rounded(advice.seen.phi),
        "auto": advice.auto.protocol,
        "best": min(simulated, key=lambda protocol: simulated[protocol]),
        "advised": advice.best.protocol,
        "advised_over_best": rounded(simulated[advice.best.protocol] / best) if best < inf else None,
        "seconds": {name: [shown(predicted[name]), shown(simulated[name])] for name in predicted},
    }


def rank_correlation(one: list[float], other: list[float]) -> float:
    return float(spearmanr(one, other).statistic)


def time_to(target: float, job: pl.Job, protocol: str, cluster: pl.Cluster, most: int, seed: int) -> float:
    """Return the seconds until the probe reaches the target loss; inf if it never does."""
    every = "updates=10" if protocol == "asp" else "updates=2"
    stop = pl.Stop(eval_loss=target, gradients=most)
    result = pl.train(job, protocol=protocol, cluster=cluster, stop=stop, evaluate_every=every, seed=seed)
    return result.time_s if result.stopped_by is pl.results.Outcome.EVAL_LOSS else inf


def shown(seconds: float) -> float | None:
    return rounded(seconds) if seconds < inf else None


def probed(job: pl.Job) -> pl.Job:
    """Return the job with its training samples as evaluation data, in one batch."""
    return replace(job, eval_data=job.data, eval_batch_size=TRAINING_SAMPLES)


JOBS: dict[str, Callable[[], pl.Job]] = {
    "softmax, B=4": lambda: probed(pl.jobs.digits(batch_size=4, lr=0.1)),
    "softmax, B=1, near its floor": lambda: probed(pl.jobs.digits(batch_size=1, lr=0.2)),
    "softmax, B=64, proportional": lambda: replace(
        probed(pl.jobs.digits(batch_size=64, lr=0.5)), lr_rule="proportional"
    ),
    "net, large rate": lambda: probed(pl.jobs.digits(model="net", batch_size=4, lr=0.3)),
    "softmax, B=64": lambda: probed(pl.jobs.digits(batch_size=64, lr=0.2)),
    "net, B=16": lambda: probed(pl.jobs.digits(model="net", batch_size=16, lr=0.1)),
    "net, momentum, B=32": lambda: replace(
        probed(pl.jobs.digits(model="net", batch_size=32)), optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.8)
    ),
}


if __name__ == "__main__":
    main()
