"""Estimation of the constants of the error bounds from a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import mean

import numpy as np

from paceline.errors import UsageError
from paceline.experiments.advise.observed_run import read_run
from paceline.policies.estimators.noise.convergence import Noise, ObservedUpdate, estimate_noise
from paceline.recording.run_folder import SavedRun
from paceline.theory import Constants
from paceline.utils.argument_types import checked_types

PARTS = 10


@checked_types
def estimate_constants(run: str | Path | SavedRun, least_loss: float = 0.0) -> Constants:
    """Estimate the constants of `pl.theory` from a run that was recorded with ``measure_steps=True``.

    From the norm N, the variance V and the loss F in each tenth of the run,

        m V = sigma2 + M_G N        fitted by non-negative least squares,
        c   = min N / (2 (F - F*)),   L = max h,   initial_error = F_0 - F*,

    with h the curvature in the directions of the noise (``policies.estimators.noise.convergence.estimate_noise``), and
    the minimum over the tenths in which N differs from 0 significantly.

    Args:
        run: folder of a run with fresh gradients, at least two per update.
        least_loss: smallest possible loss F* of the model, below the losses of the run.

    Returns:
        Constants with gamma = 0, because a run has no data on the error of stale gradients.

    Raises:
        UsageError: gradients of the run are stale, or least_loss is not below its losses.

    Differs from the theorems: they bound the worst case over all parameters, and a run covers its own path only. L is a
    mean curvature, below the largest one; c is the smallest value observed, and at most L.
    """
    observed = read_run(run if isinstance(run, SavedRun) else SavedRun(run))
    if any(each.staleness for each in observed):
        raise UsageError(
            "some gradients of the run are stale, so they belong to older parameters; record a run of k_sync or bsp"
        )
    parts = [[observed[i] for i in part] for part in np.array_split(np.arange(len(observed)), PARTS)]
    seen = [estimate_noise(part) for part in parts]
    losses = [mean(each.gradients.loss for each in part) for part in parts]
    first_loss = observed[0].gradients.loss
    lowest_loss = min([first_loss, *losses])
    if not least_loss < lowest_loss:
        raise UsageError(f"least_loss={least_loss}, but the run reached {lowest_loss:.4g}; give a smaller one")
    m = max(1, round(mean(each.samples for each in observed)))
    sigma2, M_G = _variance_law([each.squared_norm for each in seen], [m * each.variance for each in seen])
    L = max(each.curvature for each in seen)
    steep = [
        each.squared_norm / (2 * (loss - least_loss))
        for each, loss, part in zip(seen, losses, parts, strict=True)
        if each.squared_norm > 2 * _standard_error(each, part, m)
    ]
    return Constants(
        L=L, c=min([*steep, L]) if steep else 0.0, sigma2=sigma2, M_G=M_G, m=m, initial_error=first_loss - least_loss
    )


def _standard_error(seen: Noise, part: Sequence[ObservedUpdate], m: int) -> float:
    """Return the standard error of N, which tr(C^2) = h V / m dominates if the gradient is nearly 0."""
    k = mean(each.gradients.k for each in part)
    return sqrt(2 * seen.curvature * seen.variance / m / len(part)) / k


def _variance_law(squared_norms: list[float], variances: list[float]) -> tuple[float, float]:
    """Return sigma2 and M_G, both >= 0, of the least-squares line through these points."""
    from scipy.optimize import nnls  # here, because it is slow to import

    solution, _ = nnls(np.column_stack([np.ones(len(squared_norms)), squared_norms]), np.array(variances))
    return float(solution[0]), float(solution[1])
