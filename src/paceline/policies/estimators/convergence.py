"""Convergence estimation: the number of updates that another protocol needs to reach the loss of a recorded run.

At one learning rate, the loss of every protocol follows the same mean path, plus an excess from the noise of its
updates. For curvature h of the loss, variance V of a gradient, and updates of k gradients with mean staleness tau, the
excess is

    E(k, tau) = eta V / (4 k) * (1 + 2 a tau (1 + tau) / (1 + 2 tau)) / (1 - a / (2 (1 + 2 tau))),   a = eta h.

For tau = 0 this is the stationary excess of SGD on an isotropic quadratic. For tau > 0 it is the excess of SGD on the
mean of the gradients at all earlier versions, with the weights of a geometric staleness of mean tau. K-async and
asynchronous SGD have this staleness if times are exponential. The mean acts like momentum, so the path is stable for
larger a; a fixed delay would be unstable from a = 2 sin(pi / (2 (2 tau + 1))) on. Another protocol reaches the loss F
of a run at the update at which the run itself is at F - E(other) + E(own).

The gain of one update (DBW, eq. 9) is not enough: it counts the noise of every update as a further loss, while the
excess is soon stationary, and then every update removes as much of it as it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite, nan
from statistics import mean

from paceline.policies.estimators.gain import GainInput, variance_of


@dataclass(frozen=True)
class ObservedUpdate:
    """Statistics of one update of a recorded run.

    Attributes:
        gradients: statistics of its gradients and its step.
        samples: mean number of samples of a gradient.
        staleness: mean staleness of its gradients, versions, >= 0.
        rate_scale: factor on the learning rate for its quorum, > 0.
    """

    gradients: GainInput
    samples: float
    staleness: float
    rate_scale: float


@dataclass(frozen=True)
class Noise:
    """Noise statistics of the gradients of a run.

    Attributes:
        squared_norm: mean squared norm N of the gradient of the loss.
        variance: mean variance V of a gradient; nan if unknown.
        curvature: curvature h of the loss in the directions of the noise; nan if unknown.
        eta: mean step along the gradient, in units of the gradient, at a rate scale of 1.
    """

    squared_norm: float
    variance: float
    curvature: float
    eta: float

    def excess(self, k: float, staleness: float, rate_scale: float) -> float:
        """Return E(k, tau), the excess of the loss over its mean path; inf if the path is unstable."""
        eta = self.eta * rate_scale
        a, tau = eta * self.curvature, staleness
        slack = 1 - a / (2 * (1 + 2 * tau))
        return (
            eta * self.variance / (4 * k) * (1 + 2 * a * tau * (1 + tau) / (1 + 2 * tau)) / slack if slack > 0 else inf
        )

    def stable_at(self, staleness: float, rate_scale: float) -> Noise:
        """Return the same noise, with the curvature limited to half of what would have made the run unstable.

        The estimate of the curvature is too large if the loss is far from the negative log-likelihood of a good fit.
        """
        most = (1 + 2 * staleness) / (self.eta * rate_scale) if self.eta > 0 else inf
        return replace(self, curvature=min(self.curvature, most))


def estimate_noise(observed: Sequence[ObservedUpdate]) -> Noise:
    """Return the noise of the gradients, from consecutive updates.

    For normal noise, the squared norm of the mean g of k gradients with covariance C has the variance

        Var ||g||^2 = 2 tr(C^2) / k^2 + 4 grad.C.grad / k.

    The second term is approximated by 4 N tr(C^2) / (k tr C), which gives tr(C^2). If the loss is a negative
    log-likelihood, such as the cross entropy, its Hessian H is near the covariance of the gradient of one sample: C
    times the samples of a gradient. This gives the curvature h = tr(H C) / tr(C) in the directions of the noise.
    """
    eta = mean(_eta(each) for each in observed)
    known = [each for each in observed if isfinite(variance_of(each.gradients))]
    if not known:
        return Noise(nan, nan, nan, eta)
    V = mean(variance_of(each.gradients) for each in known)
    ks = [each.gradients.k for each in known]
    norms = [each.gradients.step.squared_norm - V / each.gradients.k for each in known]
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
    """Return the number of updates after which a loss curve is `shift` below its end; inf if it never is.

    The curve is linear between its points, and is extrapolated from its last two.

    Args:
        losses: points of the curve, each a number of updates and the loss after them; at least two.
        shift: difference of losses; negative for a point before the end.
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


def _eta(observed: ObservedUpdate) -> float:
    step = observed.gradients.step
    return step.progress / step.squared_norm / observed.rate_scale if step.squared_norm else 0.0
