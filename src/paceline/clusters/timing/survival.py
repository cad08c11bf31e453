"""Survival analysis of censored work: Kaplan-Meier estimates and sampled durations."""

import warnings
from collections.abc import Sequence
from itertools import groupby
from math import inf, log
from operator import attrgetter
from statistics import median

import numpy as np
from numpy.typing import NDArray

from paceline.clusters.timing.trace import TraceRow
from paceline.errors import PacelineWarning
from paceline.utils.rng import stream
from paceline.utils.wording import counted

Array = NDArray[np.float64]

LEAST_FINISHED = 10  # finished round trips of a worker for a fit of its own
JUST_AFTER = 1 + 1e-6  # censored work lasts longer than observed


def impute_censored(rows: Sequence[TraceRow], seed: int) -> list[TraceRow]:
    """Return the rows with a sampled compute time in place of each censored one.

    ``P(time > t | time > seen) = S(t) / S(seen)``, where S is the Kaplan-Meier estimate of the worker. A worker with
    fewer than 10 finished round trips uses the estimate over all workers, with a warning.

    Args:
        rows: rows of a trace, sorted by worker and draw.
        seed: seed of the run, >= 0; a time depends only on (seed, worker, index of the row).

    Source: Kaplan and Meier, "Nonparametric estimation from incomplete observations", 1958. The tail beyond the longest
    observation is exponential, as in Brown, Hollander and Korwar, "Nonparametric tests of independence for censored
    data", 1974, but with the rate of the longer half of the finished times instead of all.
    """
    everything = Survival(rows)
    done: list[TraceRow] = []
    for worker, group in groupby(rows, key=attrgetter("worker")):
        own = list(group)
        if any(row.censored for row in own):
            survival = _survival_of(worker, own) or everything
            u = stream(seed, "censored round trip", worker).random(len(own))
            own = [_ended(row, survival, u[index]) if row.censored else row for index, row in enumerate(own)]
        done += own
    return done


def _survival_of(worker: int, rows: Sequence[TraceRow]) -> "Survival | None":
    finished = sum(not row.censored for row in rows)
    if finished >= LEAST_FINISHED:
        return Survival(rows)
    warnings.warn(
        f"worker {worker} finished {finished} of {counted(len(rows), 'round trip')}, fewer than {LEAST_FINISHED}: its "
        "censored times are drawn from the times of all workers",
        PacelineWarning,
        stacklevel=2,
    )
    return None


def _ended(row: TraceRow, survival: "Survival", u: float) -> TraceRow:
    total_s = survival.time_after(row.total_s, u)
    return row._replace(compute_s=total_s, end_s=row.start_s + total_s, censored=0)


class Survival:
    """Kaplan-Meier estimate S(t) of the probability that a round trip takes longer than t seconds.

    Beyond the longest observation, S falls exponentially. The rate is that of the finished times above their median:
    their number over the sum of all seconds beyond the median.

    Args:
        rows: rows of a trace, at least one of them not censored.
    """

    def __init__(self, rows: Sequence[TraceRow]) -> None:
        from scipy.stats import CensoredData, ecdf  # here, because it is slow to import

        ended = [row.total_s for row in rows if not row.censored]
        seen = [row.total_s for row in rows if row.censored]
        survival = ecdf(CensoredData(uncensored=ended, right=seen)).sf
        self.times_s: Array = survival.quantiles
        self.probabilities: Array = survival.probabilities
        self._rising = -self.probabilities  # ascending, for searchsorted
        middle_s = median(ended)
        later = [end_s for end_s in ended if end_s > middle_s]
        beyond_s = sum(max(0.0, each - middle_s) for each in (*ended, *seen))
        self._rate_per_s = len(later) / beyond_s if later else inf

    def time_after(self, seen_s: float, u: float) -> float:
        """Return the quantile for probability ``u`` in [0, 1) of the seconds of work that takes over ``seen_s``."""
        index = int(np.searchsorted(self.times_s, seen_s, side="right")) - 1
        reached = (1 - u) * (self.probabilities[index] if index >= 0 else 1.0)
        position = int(np.searchsorted(self._rising, -reached, side="right"))  # first time with S below
        if position < len(self.times_s):
            return max(float(self.times_s[position]), seen_s * JUST_AFTER)
        tail_s = log(self.probabilities[-1] / reached) / self._rate_per_s if reached else 0.0
        return max(float(self.times_s[-1]) + tail_s, seen_s * JUST_AFTER)
