"""Hazard of loss of each worker: an empirical Bayes estimate with Gamma priors."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.utils.state_dict import Stateful

PRIOR_LOSSES = 1.0
POOLED_PRIOR_LOSSES, POOLED_PRIOR_S = 0.5, 18_000.0  # one loss in 10 h
ROUND_TRIPS_OF_AN_ESTIMATE = 100


def pooled_hazard(losses: Sequence[int], live_s: Sequence[float]) -> float:
    """Return the hazard of loss of a worker of whom nothing else is known, per second of its live time.

    ``(sum of losses + 1/2) / (sum of live times + 5 h)``: the posterior mean of a Poisson rate under the prior
    Gamma(1/2, 5 h), whose mean is one loss in ten hours. It has the shape of Jeffreys' prior, and counts as much as
    half a loss.

    Args:
        losses: number of losses of each worker, >= 0.
        live_s: live time of each worker in seconds, >= 0.

    Example:
        >>> 3600 * pooled_hazard([], []), 3600 * pooled_hazard([7, 3], [36_000.0, 36_000.0])
        (0.1, 0.42)
    """
    return (sum(losses) + POOLED_PRIOR_LOSSES) / (sum(live_s) + POOLED_PRIOR_S)


def loss_hazards(losses: Sequence[int], live_s: Sequence[float]) -> list[float]:
    """Return the hazard of loss of each worker, per second of its live time.

    ``hazard_i = (1 + losses_i) / (1 / pooled + live_i)``, with the pooled hazard of all workers: the posterior mean of
    a Poisson rate under the prior Gamma(1, 1 / pooled), which counts as much as one loss. So one loss does not set a
    worker apart that has been live for a short time.

    Args:
        losses: number of losses of each worker, >= 0.
        live_s: live time of each worker in seconds, >= 0.

    Example:
        >>> [round(3600 * hazard, 2) for hazard in loss_hazards([4, 0, 0], [36_000.0, 36_000.0, 36_000.0])]
        [0.28, 0.06, 0.06]

    Source: Gelman et al., "Bayesian data analysis", 3rd edition, 2013, Sect. 2.6 (Poisson model with exposure) and 2.7
    (rates of many groups). Here the prior has the mean of all workers and a fixed weight.
    """
    prior_s = PRIOR_LOSSES / pooled_hazard(losses, live_s)
    return [(PRIOR_LOSSES + count) / (prior_s + live) for count, live in zip(losses, live_s, strict=True)]


class LossHazards(Stateful):
    """Hazards of loss of the workers of a run, while it goes on.

    The live time of a worker is here the sum of its round trips. The hazards are estimated anew at each loss, and every
    100 round trips.

    Attributes:
        largest: largest hazard of a worker, in losses per second.
    """

    _saved = ("largest", "losses", "live_s", "pooled", "hazards", "until_next")

    def __init__(self) -> None:
        self._losses: dict[int, int] = {}
        self._live_s: dict[int, float] = {}
        self._estimate()

    def add_loss(self, worker: int) -> None:
        """Add a loss of a worker."""
        self._losses[worker] = self._losses.get(worker, 0) + 1
        self._estimate()

    def add_round_trip(self, worker: int, round_trip_s: float) -> None:
        """Add a round trip of a worker, in seconds."""
        self._live_s[worker] = self._live_s.get(worker, 0.0) + round_trip_s
        self._until_next -= 1
        if not self._until_next:
            self._estimate()

    def of(self, worker: int) -> float:
        """Return the hazard of a worker, in losses per second."""
        return self._hazards.get(worker, self._pooled)

    def _estimate(self) -> None:
        workers = sorted({*self._losses, *self._live_s})
        losses = [self._losses.get(worker, 0) for worker in workers]
        live_s = [self._live_s.get(worker, 0.0) for worker in workers]
        self._pooled = pooled_hazard(losses, live_s)
        self._hazards = dict(zip(workers, loss_hazards(losses, live_s), strict=True))
        self.largest = max([self._pooled, *self._hazards.values()])
        self._until_next = ROUND_TRIPS_OF_AN_ESTIMATE
