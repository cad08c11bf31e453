"""Hazard of loss of each worker: an empirical Bayes estimate with a Gamma prior."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

JEFFREYS = 0.5  # losses
PRIOR_LOSSES = 1.0


def pooled_hazard(losses: Sequence[int], live_s: Sequence[float]) -> float:
    """Return the hazard of loss of a worker of whom nothing else is known, per second of its live time.

    ``(sum of losses + 1/2) / (sum of live times)``: the posterior mean of a Poisson rate under Jeffreys' prior. It is
    above 0 before the first loss, and nan before any live time.

    Args:
        losses: number of losses of each worker, >= 0.
        live_s: live time of each worker in seconds, >= 0.
    """
    total_s = sum(live_s)
    return (sum(losses) + JEFFREYS) / total_s if total_s > 0 else nan


def loss_hazards(losses: Sequence[int], live_s: Sequence[float]) -> list[float]:
    """Return the hazard of loss of each worker, per second of its live time.

    ``hazard_i = (1 + losses_i) / (1 / pooled + live_i)``, with the pooled hazard of all workers: the posterior mean of
    a Poisson rate under the prior Gamma(1, 1 / pooled), which counts as much as one loss. So one
    loss does not set a worker apart that has been live for a short time.

    Args:
        losses: number of losses of each worker, >= 0.
        live_s: live time of each worker in seconds, >= 0.

    Example:
        >>> [round(3600 * hazard, 2) for hazard in loss_hazards([4, 0, 0], [3600.0, 3600.0, 3600.0])]
        [3.0, 0.6, 0.6]

    Source: Gelman et al., "Bayesian data analysis", 3rd edition, 2013, Sect. 2.6 (Poisson model with exposure) and 2.7
    (rates of many groups). Here the prior has the mean of all workers and a fixed weight.
    """
    prior_s = PRIOR_LOSSES / pooled_hazard(losses, live_s)
    return [(PRIOR_LOSSES + count) / (prior_s + live) for count, live in zip(losses, live_s, strict=True)]
