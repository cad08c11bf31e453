"""How many updates another protocol would need to the loss that a run has reached.

With the same learning rate every protocol goes down the same mean path, and what distinguishes them is how far the
noise of their updates keeps them above it. On a loss of curvature h, with gradients of variance V and updates of k of
them, tau versions old in the mean, that excess is

    E(k, tau) = eta V / (4 k) * (1 + 2 a tau (1 + tau) / (1 + 2 tau)) / (1 - a / (2 (1 + 2 tau))),   a = eta h.

For tau = 0 this is the stationary excess of SGD on an isotropic quadratic. For tau > 0 it is that of SGD whose steps
follow the mean of the gradients at all earlier versions, weighted as a geometric staleness of the mean tau weights
them, which is the staleness of K-async and of asynchronous SGD where times are exponential. Such a mean is momentum,
and so the path is stable for larger a, not smaller ones; a fixed delay would make it unstable from
a = 2 sin(pi / (2 (2 tau + 1))) on. So a run that has reached the loss F would have done so under another protocol when
it was, or will be, at F - E(other) + E(own).

The gain of one update (DBW, eq. 9) does not tell this: it counts the noise of every update as a loss of its own, though
the excess is soon as large as it gets, and then every update takes away as much of it as it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite, nan
from statistics import mean

from paceline.policies.estimators.gain import GainInput


@dataclass(frozen=True)
class Observed:
    """What one update of a run has told.

    Attributes:
        told: of its gradients and its step.
        samples: of one gradient, mean.
        staleness: mean of its gradients'.
        rate_scale: factor that the learning rate had for its quorum.
    """

    told: GainInput
    samples: float
    staleness: float
    rate_scale: float


@dataclass(frozen=True)
class Noise:
    """What the gradients of a run were like.

    Attributes:
        squared_norm: N, of the loss's gradient, mean.
        variance: V, of a gradient, mean; nan if unknown.
        curvature: h, in the directions of the noise; nan if unknown.
        eta: mean step along the gradient, in units of the gradient, at a rate scale of 1.
    """

    squared_norm: float
    variance: float
    curvature: float
    eta: float

    def excess(self, k: float, staleness: float, rate_scale: float) -> float:
        """Return E(k, tau), how far above its mean path the loss stays; inf where the path itself is unstable."""
        eta = self.eta * rate_scale
        a, tau = eta * self.curvature, staleness
        slack = 1 - a / (2 * (1 + 2 * tau))
        return (
            eta * self.variance / (4 * k) * (1 + 2 * a * tau * (1 + tau) / (1 + 2 * tau)) / slack if slack > 0 else inf
        )

    def stable_at(self, staleness: float, rate_scale: float) -> Noise:
        """Return the same noise, with a curvature under which a protocol was as stable as its run has shown.

        It is at most half of what would have been unstable. Where gradients are far from those of a log-likelihood
        with a good fit, their scatter makes the curvature look larger than it can be.
        """
        most = (1 + 2 * staleness) / (self.eta * rate_scale) if self.eta > 0 else inf
        return replace(self, curvature=min(self.curvature, most))


def variance(told: GainInput) -> float:
    """Return the variance of a gradient, as those of one update show it (DBW, eq. 10); nan if they do not."""
    if told.k > 1:
        return max(told.k / (told.k - 1) * (told.mean_square - told.step.squared_norm), 0.0)
    return told.within


def noise(observed: Sequence[Observed]) -> Noise:
    """Return what consecutive updates tell of the noise.

    The squared norm of the mean g of k gradients with the covariance C scatters, if the noise is normal, by

        Var ||g||^2 = 2 tr(C^2) / k^2 + 4 grad.C.grad / k,

    of which the second part is taken for 4 N tr(C^2) / (k tr C). So the scatter tells tr(C^2), and with it the
    curvature that the noise meets, h = tr(H C) / tr(C), where the loss is a negative log-likelihood, as the cross
    entropy is: its Hessian H is then near the covariance of the gradient of one sample, which is C times the samples
    of a gradient.
    """
    eta = mean(_eta(each) for each in observed)
    known = [each for each in observed if isfinite(variance(each.told))]
    if not known:
        return Noise(nan, nan, nan, eta)
    V = mean(variance(each.told) for each in known)
    ks = [each.told.k for each in known]
    norms = [each.told.step.squared_norm - V / each.told.k for each in known]
    N = max(mean(norms), 0.0)
    if not V:
        return Noise(N, 0.0, 0.0, eta)
    pairs = [(k, (after - before) ** 2 / 2) for k, (before, after) in zip(ks, pairwise(norms), strict=False)]
    if not pairs:
        return Noise(N, V, nan, eta)
    scatter = mean(square for _, square in pairs)
    per_square = mean(2 / k**2 + 4 * N / (k * V) for k, _ in pairs)
    samples = mean(each.samples for each in known)
    return Noise(N, V, samples * scatter / per_square / V, eta)


def updates_needed(losses: Sequence[tuple[float, float]], shift: float) -> float:
    """Return after how many updates a curve is `shift` below where it ends; inf if it will never be.

    Between its points the curve is taken for straight, and beyond its end it goes on as in its last part.

    Args:
        losses: updates made, and the loss then; at least two points.
        shift: may be negative, for a moment before the end.
    """
    target = losses[-1][1] - shift
    for (before, high), (after, low) in pairwise(losses):
        if high > target >= low:
            return before + (after - before) * (high - target) / (high - low)
    (before, high), (after, low) = losses[-2:]
    slope = (high - low) / (after - before)
    if target >= losses[0][1]:
        return losses[0][0]
    return after + (low - target) / slope if slope > 0 else inf


def _eta(observed: Observed) -> float:
    step = observed.told.step
    return step.progress / step.squared_norm / observed.rate_scale if step.squared_norm else 0.0
