"""Time of a plan without paceline: a closed form, and a literal simulation with drawn round trips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

import paceline as pl
from papers.sync_switch.settings import Measured

Array = NDArray[np.float64]
RUNS = 200


def harmonic(n: int) -> float:
    """Return H_n = 1 + 1/2 + ... + 1/n, the mean of the largest of n exponential(1) times."""
    return float(sum(1 / i for i in range(1, n + 1)))


@dataclass(frozen=True)
class Workers:
    """n workers with round trips of ``shift_s + mean_s Exp(1)``, some of them periodically slow.

    Args:
        stragglers: periods of slow workers, with distinct worker ids; all others are never slow.
    """

    n: int
    shift_s: float
    mean_s: float
    stragglers: Sequence[pl.timing.Periodic] = ()

    @classmethod
    def of(cls, cluster: pl.Cluster) -> Workers:
        """Return the workers of a cluster whose stragglers are all periodic, with ids."""
        law = cluster.distribution_of(0)
        assert isinstance(law, pl.timing.ShiftedExponential)
        stragglers = tuple(each for each in cluster.slowdowns if isinstance(each, pl.timing.Periodic))
        assert len(stragglers) == len(cluster.slowdowns)
        return cls(cluster.n, law.shift_s, law.mean_s, stragglers)

    # -- closed form

    def bsp_update_s(self) -> float:
        """Return the mean seconds of an update of BSP.

        Without stragglers it is shift + mean H_n. With one straggler it is that for a share of the time. For the rest
        it is the mean of the largest of one slow round trip and n - 1 others. The rates of both parts are averaged,
        and updates that cross from one part into the other are neglected.
        """
        normal_s = self.shift_s + self.mean_s * harmonic(self.n)
        if not self.stragglers:
            return normal_s
        [straggler] = self.stragglers
        share = straggler.on_s / straggler.every_s
        return 1 / ((1 - share) / normal_s + share / self._slow_update_s(straggler.slowdown))

    def _slow_update_s(self, slowdown: float) -> float:
        """Return E[max(slowdown X_1, X_2, ... X_n)], the integral of 1 - F."""
        t = np.linspace(0, slowdown * (self.shift_s + 40 * self.mean_s), 200_001)
        others = self._distribution(t) ** (self.n - 1)
        return float(np.trapezoid(1 - self._distribution(t / slowdown) * others, t))

    def _distribution(self, t: Array) -> Array:
        return 1 - np.exp(-np.maximum(t - self.shift_s, 0) / self.mean_s)

    def asp_s(self, gradients: int) -> float:
        """Return the seconds of a number of gradients under ASP if all workers start together.

        A worker delivers t / m - (m^2 - s^2) / (2 m^2) gradients in t seconds of work, with the mean m and the
        standard deviation s of a round trip (renewal theory); a straggler has fewer seconds of work.
        """
        mean_s = self.shift_s + self.mean_s
        missing = self.n * (mean_s**2 - self.mean_s**2) / (2 * mean_s**2)
        lost = sum(each.on_s / each.every_s * (1 - 1 / each.slowdown) for each in self.stragglers)
        return (gradients + missing) * mean_s / (self.n - lost)

    def plan_s(self, workload: int, share: float) -> float:
        """Return the seconds of a plan with this share of BSP, in closed form."""
        updates = int(np.ceil(share * workload / self.n))
        asp_s = self.asp_s(workload - updates * self.n) if updates * self.n < workload else 0.0
        return updates * self.bsp_update_s() + asp_s

    def ideal_s(self, workload: int, share: float) -> float:
        """Return the seconds of a plan whose BSP excludes each straggler exactly while it is slow.

        This is the time of an elastic policy that detects each slow and each recovered worker at once.
        """
        if not self.stragglers:
            return self.plan_s(workload, share)
        [every_s] = {each.every_s for each in self.stragglers}
        t_s = np.linspace(0, every_s, 10_000, endpoint=False) + max(each.at_s for each in self.stragglers)
        slow = [(t_s - each.at_s) % every_s < each.on_s for each in self.stragglers]
        paces = np.array([k / (self.shift_s + self.mean_s * harmonic(k)) for k in range(1, self.n + 1)])
        pace = paces[self.n - 1 - np.sum(slow, axis=0)].mean()
        return share * workload / float(pace) + self.asp_s(round((1 - share) * workload))

    # -- simulated literally

    def played_s(self, workload: int, share: float, seed: int = 0, runs: int = RUNS) -> Array:
        """Return the seconds of a plan with this share of BSP in drawn runs, ``[runs]``."""
        rng = np.random.default_rng(seed)
        updates = int(np.ceil(share * workload / self.n))
        now_s = np.zeros(runs)
        for _ in range(updates):
            now_s = self._ends_s(now_s, self._draw(rng, runs, 1)).max(axis=(1, 2))
        left = workload - updates * self.n
        if left <= 0:
            return now_s
        draws = round(1.3 * left / self.n) + 50  # more than any worker computes
        ends_s = self._ends_s(now_s, self._draw(rng, runs, draws).cumsum(axis=2))
        return np.partition(ends_s.reshape(runs, -1), left - 1, axis=1)[:, left - 1]

    def _draw(self, rng: np.random.Generator, runs: int, draws: int) -> Array:
        """Return seconds of work, ``[runs, n, draws]``."""
        return self.shift_s + self.mean_s * rng.standard_exponential((runs, self.n, draws))

    def _ends_s(self, begun_s: Array, work_s: Array) -> Array:
        """Return the ends of the work, ``[runs, n, draws]``, that starts at given seconds, ``[runs]``."""
        ends_s = begun_s[:, None, None] + work_s
        for straggler in self.stragglers:
            done_s = done(begun_s[:, None], straggler)
            for worker in np.atleast_1d(straggler.workers).astype(int):
                ends_s[:, worker] = when(done_s + work_s[:, worker], straggler)
        return ends_s


@cache  # panels share their plans
def mean_played_s(workers: Workers, workload: int, share: float) -> float:
    """Return the mean seconds of a plan with this share of BSP in drawn runs."""
    return float(workers.played_s(workload, share).mean())


def done(t_s: Array | float, straggler: pl.timing.Periodic) -> Array:
    """Return the seconds of work that a straggler has done until t if it is never idle.

    >>> float(done(100.0, pl.timing.Periodic(on_s=20, every_s=100, slowdown=5, workers=(0,))))
    84.0
    """
    whole, rest_s = np.divmod(np.asarray(t_s, dtype=float) - straggler.at_s, straggler.every_s)
    slow_s = whole * straggler.on_s + np.minimum(rest_s, straggler.on_s)
    return np.where(whole < 0, t_s, t_s - slow_s * (1 - 1 / straggler.slowdown))


def when(work_s: Array | float, straggler: pl.timing.Periodic) -> Array:
    """Return the second at which a straggler has done this much work: the inverse of `done`.

    >>> float(when(84.0, pl.timing.Periodic(on_s=20, every_s=100, slowdown=5, workers=(0,))))
    100.0
    """
    in_slow_s = straggler.on_s / straggler.slowdown
    in_period_s = straggler.every_s - straggler.on_s + in_slow_s
    whole, rest_s = np.divmod(np.asarray(work_s, dtype=float) - straggler.at_s, in_period_s)
    within_s = np.where(rest_s < in_slow_s, rest_s * straggler.slowdown, straggler.on_s + rest_s - in_slow_s)
    return np.where(whole < 0, work_s, straggler.at_s + whole * straggler.every_s + within_s)


def theirs_s(measured: Measured, n: int, workload: int, share: float) -> float:
    """Return the seconds of a plan at the rates that the authors measured for the two protocols.

    No law of round trips gives both rates: BSP is limited by their framework, not by its slowest worker.
    """
    return share * workload / n * measured.bsp_s + (1 - share) * workload * measured.asp_s
