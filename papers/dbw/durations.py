"""Fig. 3: E[T_kk] estimated by DBW and by the mean of the samples of (k, k) alone, and its true value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import paceline as pl
from paceline.policies.controllers.base import Action
from paceline.policies.controllers.update_times import UpdateTimes
from paceline.policies.estimators.dbw.update_time import UpdateTimeEstimator
from papers.store import Line, rounded
from papers.tasks import Where

Array = NDArray[Any]
N = 5
CLUSTER = pl.Cluster(N, pl.timing.ShiftedExponential(shift_s=0.3, mean_s=0.7))
SHARES = (0.3, 0.3, 0.05, 0.05, 0.3)  # of updates that wait for k = 1 ... 5: 3 and 4 are rare
UPDATES = 100


class Both(UpdateTimeEstimator):
    """DBW's estimator with the naive means."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.samples: dict[tuple[int, int], list[float]] = defaultdict(list)

    def add(self, version: int, h: int, i: int, t_s: float) -> None:
        """Add a sample to both."""
        super().add(version, h, i, t_s)
        self.samples[h, i].append(t_s)

    def naive(self) -> list[float]:
        """Return the mean of the samples of (k, k), nan without samples."""
        return [float(np.mean(self.samples[k, k])) if self.samples[k, k] else float("nan") for k in range(1, N + 1)]


@dataclass(frozen=True)
class Watch(pl.controllers.Controller[UpdateTimes]):
    """Controller that waits for given k and records both estimates at each update.

    Args:
        ks: quorums of the updates, in order.
        said: list to which each update appends DBW's and the naive estimates.
    """

    ks: Sequence[int]
    said: list[tuple[list[float], list[float]]] = field(default_factory=list)

    def begin(self, n: int) -> UpdateTimes:
        """Start without measurements."""
        return UpdateTimes(n, Both(n), late=True)

    def decide(
        self, state: UpdateTimes, observation: pl.controllers.Observation
    ) -> tuple[UpdateTimes, Sequence[Action]]:
        """Add the samples of an arrival, and set the next k when an update opens."""
        if observation.trigger == "arrival":
            state.observe(observation)
        if observation.trigger != "open":
            return state, []
        if observation.version:
            assert isinstance(state.durations, Both)
            self.said.append((list(state.durations.estimate().times), state.durations.naive()))
        state.open_round(observation)
        k = self.ks[min(observation.version, len(self.ks) - 1)]
        return state, [pl.controllers.SetQuorum(k, "the list says so")]


@dataclass(frozen=True)
class Durations:
    """Task of the figure for one seed.

    Args:
        truth_updates: number of updates of the long simulations that measure the true times, >= 1.
    """

    seed: int
    truth_updates: int = 20_000

    def asked(self) -> Line:
        """Return the fields as plain JSON."""
        return {"figure": "3", "cluster": str(CLUSTER), "shares": list(SHARES), "updates": UPDATES, "seed": self.seed}

    def carry_out(self, where: Where) -> Line:
        """Return both estimates after each update, the true values, and the errors."""
        updates = where.updates or UPDATES
        ks = np.random.default_rng(self.seed).choice(np.arange(1, N + 1), p=SHARES, size=updates + 1).tolist()
        watch = Watch(ks)
        pl.simulate(pl.plans.Phase(pl.backup(k=1), controllers=(watch,)), CLUSTER, updates=updates, seed=self.seed)
        truth = [self._truth_s(k) for k in range(1, N + 1)]
        estimated, naive = (np.array([said[i] for said in watch.said]) for i in (0, 1))
        both = ~np.isnan(naive)
        return {
            "k": ks[:updates],
            "truth_s": rounded(truth),
            "estimated_s": [rounded(row) for row in estimated],
            "naive_s": [rounded(row) for row in naive],
            "error": {"estimated": _error(estimated, truth, both), "naive": _error(naive, truth, both)},
            "error_without_naive": _error(estimated, truth, ~both),
            "wrong_order": {"estimated": _disorder(estimated), "naive": _disorder(naive)},
        }

    def _truth_s(self, k: int) -> float:
        return pl.simulate(pl.backup(k), CLUSTER, updates=self.truth_updates, seed=self.seed).seconds_per_update


def _error(said: Array, truth: Sequence[float], where: Array) -> float:
    """Return the mean of |estimate / truth - 1| over some updates and k."""
    return float(np.abs(said / np.array(truth) - 1)[where].mean().round(4))


def _disorder(said: Array) -> float:
    """Return the share of updates at which some estimated T_kk exceeds that of a larger k."""
    known = [row[~np.isnan(row)] for row in said]
    return float(np.mean([bool((np.diff(row) < -1e-9).any()) for row in known]).round(4))
