"""Convergence estimation: the number of updates that another protocol needs to reach the loss of a recorded run.

At one learning rate the noise of the updates keeps the loss from falling below a floor. For curvature h of the loss,
variance V of a gradient, and updates of k gradients with mean staleness tau, the loss settles on average at

    E(k, tau) = eta V / (4 k) * (1 + 2 a tau (1 + tau) / (1 + 2 tau)) / (1 - a / (2 (1 + 2 tau))),   a = eta h,

above its least value. For tau = 0 this is the stationary excess of SGD on an isotropic quadratic. For tau > 0 it is the
excess of SGD on the mean of the gradients at all earlier versions, with the weights of a geometric staleness of mean
tau. K-async and asynchronous SGD have this staleness if times are exponential. The mean acts like momentum, so the path
is stable for larger a; a fixed delay would be unstable from a = 2 sin(pi / (2 (2 tau + 1))) on.

Without noise, the loss still to go P falls as c / t. With a floor f it follows dP/dt = -(P^2 - f^2) / c, and arrives
after U atanh(x) / x updates, x = f / P, where U updates suffice without noise. The loss scatters about its mean, and a
run ends when it first reaches its target. So the floor counts as x^2 = E / (2 P): a loss of half the mean excess is the
20 % quantile for noise in six directions.

The gain of one update (DBW, eq. 9) is not enough: it counts the noise of every update as a further loss, while the
excess is soon stationary, and then every update removes as much of it as it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import atanh, inf, isfinite, log, nan, sqrt
from statistics import mean, variance
from typing import NamedTuple

from paceline.policies.estimators.dbw.gain import GainInput, variance_of


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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
        return Noise(squared_norm=nan, variance=nan, curvature=nan, eta=eta)
    V = mean(variance_of(each.gradients) for each in known)
    ks = [each.gradients.k for each in known]
    norms = [each.gradients.step.squared_norm - V / each.gradients.k for each in known]
    N = max(mean(norms), 0.0)
    if not V:
        return Noise(squared_norm=N, variance=0.0, curvature=0.0, eta=eta)
    pairs = [(k, (after - before) ** 2 / 2) for k, (before, after) in zip(ks, pairwise(norms), strict=False)]
    if not pairs:
        return Noise(squared_norm=N, variance=V, curvature=nan, eta=eta)
    scatter = mean(square for _, square in pairs)
    per_square = mean(2 / k**2 + 4 * N / (k * V) for k, _ in pairs)
    samples = mean(each.samples for each in known)
    return Noise(squared_norm=N, variance=V, curvature=samples * scatter / per_square / V, eta=eta)


class LossAtEnd(NamedTuple):
    """Loss at the end of a run, from its second half.

    Attributes:
        fall: decrease of the loss in an update.
        to_go: loss still to go, P > 0.
    """

    fall: float
    to_go: float


def loss_at_end(losses: Sequence[float]) -> LossAtEnd:
    """Return how fast the loss falls at the end of a run, and how much it can still fall.

    With the mean losses F of the last quarter of U updates and F' of the quarter before, the fall is 4 (F' - F) / U.
    A loss c / t + constant has P = (F' - F) / (4 ln(9/8)) to go. One standard error of F' - F is added to it, because a
    protocol must not be excluded by the noise of losses. P is at most F: a negative log-likelihood cannot fall below 0.

    Args:
        losses: mean loss of each update, at least eight.
    """
    half, last = len(losses) // 2, 3 * len(losses) // 4
    before, after = losses[half:last], losses[last:]
    fall = mean(before) - mean(after)
    error = sqrt(variance(before) / len(before) + variance(after) / len(after))
    to_go = (max(fall, 0.0) + error) / (4 * log(9 / 8))
    least = 1e-12 * max(abs(mean(after)), 1e-300)  # of losses that are all equal
    return LossAtEnd(fall / len(after), max(min(to_go, mean(after)) if mean(after) > 0 else to_go, least))


def energy_curvature(observed: Sequence[ObservedUpdate], fall: float) -> float:
    """Return the curvature h of the loss along the steps of a run, >= 0; nan if it made none.

    A step s with the mean gradient g of k gradients lowers the loss by grad.s - h ||s||^2 / 2 on average. The noise of
    g is in s too, so that grad.s = g.s - eta V / k. The mean over the updates gives

        h = 2 (mean g.s - eta V / k - fall) / mean ||s||^2.

    Args:
        observed: updates, one or more, with a known variance.
        fall: mean decrease of the loss in an update.
    """
    steps = [each.gradients.step for each in observed]
    V = mean(variance_of(each.gradients) for each in observed)
    noise = mean(each.gradients.step.learning_rate / each.gradients.k for each in observed) * V
    square = mean(step.squared_step for step in steps)
    return max(0.0, 2 * (mean(step.progress for step in steps) - noise - fall) / square) if square else nan


def relative_updates(share: float) -> float:
    """Return atanh(x) / x, the updates to a loss with noise over those without, for x^2 = `share` >= 0.

    >>> [round(relative_updates(share), 2) for share in (0.0, 0.5, 0.9, 1.0)]
    [1.0, 1.25, 1.92, inf]
    """
    x = sqrt(share)
    return inf if x >= 1 else atanh(x) / x if x > 1e-6 else 1.0


def _eta(observed: ObservedUpdate) -> float:
    step = observed.gradients.step
    return step.progress / step.squared_norm / observed.rate_scale if step.squared_norm else 0.0
