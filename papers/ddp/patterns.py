"""Patterns of slowness, as simulated clusters with and without their slow worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import paceline as pl
from paceline.clusters.faults import Fault
from paceline.clusters.timing.distributions import Distribution, Empirical
from papers.ddp.restarts import CheckpointRestart

GRADIENT_S = 0.1
"""Mean seconds of a gradient of a worker that is not slow."""

HOUR_S = 3600.0

STEADY = pl.timing.Gamma(400, GRADIENT_S)  # standard deviation 5 %


@dataclass(frozen=True)
class Pattern:
    """Pattern of slowness of n workers, of which the last one is the slow one, if it is always the same.

    Args:
        text: what the user sees.
        speeds: function from n to the speed of each worker.
        rotates: whether each worker in turn is 3 times slower, for 20 round trips.
        timing: seconds of a gradient at speed 1.
        dies: whether the last worker dies once and comes back; see `Death`.
    """

    text: str
    speeds: Callable[[int], Sequence[float]] = lambda n: [1.0] * n
    rotates: bool = False
    timing: Distribution = STEADY
    dies: bool = False

    def cluster(self, n: int, *, without_slow: bool = False, **more: Any) -> pl.Cluster:
        """Return the simulated cluster.

        Args:
            n: number of workers.
            without_slow: whether the user has removed the last worker.
            more: more arguments of the cluster.
        """
        live = n - without_slow
        turn_s = 20 * GRADIENT_S
        turns = [
            pl.timing.Periodic(on_s=turn_s, every_s=n * turn_s, slowdown=3.0, workers=(worker,), at_s=worker * turn_s)
            for worker in range(live if self.rotates else 0)
        ]
        return pl.Cluster(live, self.timing, speed=list(self.speeds(n)[:live]), slowdowns=turns, **more)


@dataclass(frozen=True)
class Death:
    """Death of the last worker in the middle of a job that lasts an hour under DDP.

    DDP restarts from a checkpoint of every 10 minutes, and repeats half an interval. The worker is away for two
    minutes, and detecting the failure, starting all ranks and loading the checkpoint take one minute more.

    Args:
        ddp_s: seconds of the whole run under DDP without a failure.
        updates: updates of this run.
    """

    ddp_s: float
    updates: int

    RESTART = CheckpointRestart(interval_s=600, away_s=120, restart_s=60)  # in a job of an hour

    @property
    def ddp_lost_s(self) -> float:
        """Seconds that DDP loses."""
        return self.ddp_s * (self.RESTART.mean_loss_s / HOUR_S)

    def fault(self, n: int) -> Fault:
        """Return the fault of a run that goes on with the other workers."""
        return Fault(
            worker=n - 1,
            draw=max(1, self.updates // 2),
            kind="die",
            back_after_s=self.ddp_s * (self.RESTART.away_s / HOUR_S),
        )


def one_slow(speed: float) -> Callable[[int], Sequence[float]]:
    """Return a function to the speeds of workers of which the last one is slow."""
    return lambda n: [1.0] * (n - 1) + [speed]


def sometimes_slow(share: float, factor: float) -> Distribution:
    """Return the times of gradients of which a share, a whole part of 1, takes longer by a factor."""
    steady = STEADY.quantile((np.arange(400) + 0.5) / 400)
    return Empirical(tuple(np.concatenate([np.tile(steady, round(1 / share) - 1), factor * steady]).tolist()))


PATTERNS: Mapping[str, Pattern] = {
    "none": Pattern("no worker is slow"),
    "half": Pattern("one worker has half the speed", one_slow(1 / 2)),
    "quarter": Pattern("one worker has a quarter of the speed", one_slow(1 / 4)),
    "rotating": Pattern("one worker is 3 times slower, another one after every 20 round trips", rotates=True),
    "transient": Pattern("5 % of the gradients take 5 times longer, on any worker", timing=sometimes_slow(1 / 20, 5)),
    "ladder": Pattern("the speeds of the workers go evenly from 1 to 1/3", lambda n: np.linspace(1, 1 / 3, n).tolist()),
    "death": Pattern("one worker dies in the middle of the run and comes back", dies=True),
}
