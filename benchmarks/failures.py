"""Hours of a job on 64 workers that fail: paceline, restarts from a checkpoint, and torchft, in simulation.

The job has 3,000 updates of 64 gradients, 400 minutes under BSP without a failure. Failures are of the whole cluster:

- `mttf`: exponential times between them, 8 h in the mean.
- `injected`: one after every 45 to 75 minutes, as in a published comparison of Clockwork's TorchPass with torchft and
  with restarts, on 64 GPUs, of which this job has the size.

All contenders have the same failures. A failed worker is away for 10 minutes. Gradients take no time to be sent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import paceline as pl
from common import options, report, rounded
from paceline.catalogue.parser import parse_plan
from paceline.clusters.timing.distributions import Distribution
from paceline.coordinator.coordinator import Coordinator
from paceline.theory.order_statistics import order_statistic
from paceline.utils.confidence_intervals import interval_of_mean

sys.path.append(str(Path(__file__).parents[1]))
from papers.ddp.failing_workers import FailingWorkers, Recovery, failures
from papers.ddp.patterns import HOUR_S
from papers.ddp.restarts import CheckpointRestart, best_interval_s
from papers.ddp.settings import TORCHFT_STEP_S
from papers.ddp.times import update_times_s

N, UPDATES = 64, 3_000
UPDATE_S = 8.0  # of BSP without a failure, in the mean
GRADIENT = partial(pl.timing.Gamma, 400)  # by its mean: no worker is slow, as in the pattern "none" of papers/ddp
INJECTED = pl.timing.Uniform(45 * 60, 75 * 60)
OFTEN_S = 1_800.0  # between two checkpoints, where their cost is not known
BACKGROUND_S = 1.0  # for which training waits while a checkpoint is written in the background
Hours = dict[str, list[float]]


class Survivor(NamedTuple):
    """Contender whose other workers go on when one fails."""

    protocol: str
    recovery: Recovery
    more_s: float = 0.0  # of an update


def main() -> None:
    parser = options(__doc__ or "", rounds=50)
    parser.add_argument("--mttf-h", type=float, default=8.0, help="mean hours between two failures of the cluster")
    parser.add_argument("--away-s", type=float, default=600.0, help="from a failure until its worker is back")
    parser.add_argument("--restart-s", type=float, default=300.0, help="of detecting, starting and loading")
    parser.add_argument("--detection-s", type=float, default=60.0, help="without a restart: of detecting alone")
    parser.add_argument("--state-s", type=float, default=60.0, help="of writing a checkpoint, or of sending the state")
    args = parser.parse_args()
    profiles: dict[str, Distribution] = {"mttf": pl.timing.Exponential(args.mttf_h * HOUR_S), "injected": INJECTED}
    report("failures", args, {name: measured(args, between) for name, between in profiles.items()})


def measured(args: argparse.Namespace, between: Distribution) -> dict[str, Any]:
    """Return the hours of all contenders, with the seeds of all rounds."""
    gradient = GRADIENT(UPDATE_S / order_statistic(GRADIENT(1.0), N, N))
    whole: Hours = {name: [] for name in ("no failure", *survivors(args), *restarts(args, between))}
    updates: Hours = {name: [] for name in survivors(args)}
    for seed in range(args.rounds):
        work_s = pl.simulate("bsp", pl.Cluster(N, gradient), updates=UPDATES, seed=seed).time_s
        whole["no failure"].append(work_s / HOUR_S)
        for name, survivor in survivors(args).items():
            times_s = survived_s(survivor, gradient, between, seed)
            whole[name].append(times_s[-1] / HOUR_S)
            updates[name].append(times_s[UPDATES - 1] / HOUR_S)
        for name, restart in restarts(args, between).items():
            failed_s = (failure.at_s for failure in failures(between, N, seed))
            whole[name].append(restart.run_s(work_s, failed_s) / HOUR_S)
    best = min(restarts(args, between), key=lambda name: mean(whole[name]))
    return {
        "mean_h_between_failures": rounded(between.expectation_s / HOUR_S),
        "hours_of_all_gradients": {name: with_interval(values) for name, values in whole.items()},
        "hours_of_as_many_updates": {name: with_interval(values) for name, values in updates.items()},
        "hours_less_than_best_restart": {
            "best_restart": best,
            **{name: with_interval(differences(whole[best], whole[name])) for name in survivors(args)},
        },
        "restarts": {
            name: {
                "interval_s": rounded(restart.interval_s),
                "expected_h_if_exponential": rounded(
                    restart.expected_s(UPDATES * UPDATE_S, between.expectation_s) / HOUR_S
                ),
            }
            for name, restart in restarts(args, between).items()
        },
    }


def survivors(args: argparse.Namespace) -> Mapping[str, Survivor]:
    """Return the contenders that do not restart.

    BSP waits for a failed worker until its failure is detected, and k_sync does not. torchft repeats the update in
    which a worker has failed, and the others wait for the state that a returning worker receives.
    """
    waits, goes_on = Recovery(args.away_s, loss_s=args.detection_s), Recovery(args.away_s)
    repeats = Recovery(args.away_s, loss_s=args.detection_s + UPDATE_S, return_s=args.state_s)
    return {
        "bsp": Survivor("bsp", waits),
        "k_sync(k=60)": Survivor("k_sync(k=60)", goes_on),
        "torchft": Survivor("bsp", repeats, TORCHFT_STEP_S),
    }


def restarts(args: argparse.Namespace, between: Distribution) -> Mapping[str, CheckpointRestart]:
    """Return the restarts from a checkpoint: from a common one to what costs least."""
    mean_s = between.expectation_s

    def best(away_s: float, write_s: float) -> CheckpointRestart:
        return CheckpointRestart(best_interval_s(write_s, mean_s), away_s, args.restart_s, write_s)

    return {
        f"restart, every {OFTEN_S / 60:g} min": CheckpointRestart(OFTEN_S, args.away_s, args.restart_s, args.state_s),
        "restart, best interval": best(args.away_s, args.state_s),
        "restart, best interval, spare worker": best(0.0, args.state_s),
        "restart, best interval, spare worker, background writes": best(0.0, BACKGROUND_S),
    }


def survived_s(survivor: Survivor, gradient: pl.timing.Gamma, between: Distribution, seed: int) -> list[float]:
    """Return the time of each update until all gradients of the job are used."""
    cluster = pl.Cluster(N, gradient, server=pl.timing.ServerTime(update_s=survivor.more_s))
    engine = FailingWorkers(cluster, seed, failures(between, N, seed), survivor.recovery)
    stop = pl.Stop(gradients=N * UPDATES)
    return update_times_s(engine, Coordinator(parse_plan(survivor.protocol), workers=N, stop=stop))


def differences(longer: Sequence[float], shorter: Sequence[float]) -> list[float]:
    return [above - below for above, below in zip(longer, shorter, strict=True)]


def with_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of some values, with its 95 % confidence interval and all of them in order."""
    interval = interval_of_mean(values)
    low_high = [rounded(interval.low), rounded(interval.high)] if interval else None
    return {"mean": rounded(mean(values)), "interval": low_high, "rounds": [rounded(value) for value in values]}


if __name__ == "__main__":
    main()
