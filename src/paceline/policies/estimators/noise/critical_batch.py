"""Critical number of gradients of an update, from the variance of gradients and the loss still to go."""

from __future__ import annotations

from math import isfinite, nan, sqrt
from typing import NamedTuple

from paceline.core.update import Step
from paceline.policies.estimators.noise.loss_to_go import FIRST_GRADIENTS, LossToGo
from paceline.policies.estimators.noise.recent_mean import RecentMean
from paceline.utils.state_dict import Stateful

LARGEST_NOISE_SHARE = 0.95
LEAST_PHI = 1 / 64  # of the reference's gradients
LARGEST_PHI = LARGEST_NOISE_SHARE / (1 - LARGEST_NOISE_SHARE)  # of the reference's gradients: 19
FIRST_PHI = 1 / 8


class NoiseEstimate(NamedTuple):
    """Estimates behind a learning rate.

    Attributes:
        variance: V, variance of the gradient of one minibatch; nan if it is unknown.
        to_go: P, loss still to go; nan at the beginning.
        phi: critical number of gradients of an update, > 0.
        has_fallen: whether the loss has fallen significantly since the run began.
        assumed: what is assumed for lack of data; empty for nothing.
        noise_scale: B = V / N, the gradients whose mean is half noise, of an adaptive optimizer; None for others.
    """

    variance: float
    to_go: float
    phi: float
    has_fallen: bool = True
    assumed: str = ""
    noise_scale: float | None = None


class UpdateStats(NamedTuple):
    """Statistics of an update with a measured step.

    Attributes:
        k: number of minibatches, >= 1.
        gradients: number of gradients, which are parts of these minibatches, or the whole ones; >= 1.
        mean_square: mean of their squared norms, by samples.
        step: measured step.
        lr_scale: factor on the learning rate of the optimizer in this step.
    """

    k: int
    gradients: int
    mean_square: float
    step: Step
    lr_scale: float


class CriticalBatch(Stateful):
    """Estimator of phi, the number of gradients of an update at which noise and curvature limit the rate equally.

    A reference, such as BSP, makes updates of K gradients at the learning rate eta. With V the variance of a gradient
    and P the loss still to go,

        r   = min(0.95, eta V / (2 K P))          share of the noise of the reference in the loss still to go, doubled
        phi = max(K / 64, K r / (1 - r));         K / 8 for the first 24 gradients.

    V is the mean over the latest 30 % of the gradients, from microbatches, or from the gradients of an update:

        V = k / (j - 1) (mean ||g_i||^2 - ||g||^2),

    with j gradients of k minibatches; j = k unless they are of parts of minibatches, where the mean is by samples.

    So phi is at most 19 K, 152 for 8 workers, because r is at most 0.95. For r = 1, noise would explain all of the loss
    still to go, and phi would be infinite; a larger r has no meaning. At 19 K the rate of an update of k gradients is
    proportional to k within 5 %, so a larger phi would change nothing. The limit is reached where V / P is large: on a
    plateau, where little seems to be left to go, and where the loss falls so fast that V, a mean over the past, is that
    of larger losses. It is common with momentum, whose eta / (1 - mu) is large. It says that noise is large, and
    nothing about curvature.

    P is that of `LossToGo`. If the learning rate drops by a schedule, the loss falls because the noise does; this fall
    is left out of P.

    With momentum mu the rate is that of a whole movement, eta / (1 - mu). With an adaptive optimizer it is measured:
    with g the mean gradient and s the step, E[g.s] = e (N + (1 - mu) V / k), where N = max(||g||^2 - V / k, 0). Its
    steps shrink by the noise, too: V / N is at most 64 K here.

    Args:
        K: gradients of an update of the reference, >= 1.
        learning_rate: eta at the start, without schedule.
        momentum: mu in [0, 1); beta1 of Adam.
        adaptive: whether the optimizer divides by the size of past gradients, as Adam does.

    Attributes:
        steps: number of measured steps.

    Differs from McCandlish et al., "An empirical model of large-batch training", 2018: their noise scale tr(Sigma) / N
    is 3 to 17 times what tuned rates ask for. V / P is what limits the loss in the end.
    """

    _saved = ("steps", "_rate")
    _parts = ("_to_go", "_within", "_between", "_squares", "_along", "_norms", "_signal")

    def __init__(self, K: int, learning_rate: float, momentum: float = 0.0, adaptive: bool = False) -> None:
        self.steps = 0
        self._K = K
        self._momentum = momentum
        self._adaptive = adaptive
        self._rate = learning_rate  # of the optimizer, with its schedule
        self._to_go = LossToGo()
        self._within = RecentMean(0.3)
        self._between = RecentMean(0.3)
        self._squares = RecentMean(0.3)
        self._along = RecentMean(0.3)  # of g.s
        self._norms = RecentMean(0.3)  # of what e multiplies in g.s
        self._signal = RecentMean(0.3)  # of ||g||^2 - V / k

    def accept_loss(self, loss: float) -> None:
        """Add the mean loss of a minibatch."""
        self._to_go.accept(loss)

    def accept(self, variance: float, squared_norm: float) -> None:
        """Add an accepted gradient: the variance of a minibatch from microbatches, or nan, and its squared norm."""
        if isfinite(variance):
            self._within.add(variance)
        if isfinite(squared_norm):
            self._squares.add(squared_norm)

    def finish_update(self, update: UpdateStats) -> None:
        """Add an update with a measured step."""
        step = update.step
        if not isfinite(step.squared_norm + step.progress) or update.lr_scale <= 0:
            return
        if update.gradients > 1:
            self._between.add(update.k / (update.gradients - 1) * (update.mean_square - step.squared_norm))
        if self._adaptive:
            self._measure_rate(update)
        self._follow_rate(step.next_learning_rate)
        self.steps += 1

    def _measure_rate(self, update: UpdateStats) -> None:
        """Add the progress of a step along its gradient, and the squared norm that it would have at rate 1."""
        V, _ = self._variance()
        signal = update.step.squared_norm - V / update.k
        if isfinite(signal):
            self._signal.add(signal)
        N = max(signal, 0.0)
        size, size_of_reference = N + V / update.k, N + V / self._K  # squares, by which the optimizer divides
        if size_of_reference > 0:
            self._along.add(update.step.progress / update.lr_scale * sqrt(size / size_of_reference))
            self._norms.add(N + (1 - self._momentum) * V / update.k)

    def _follow_rate(self, rate: float) -> None:
        if rate < 0.9 * self._rate:
            self._to_go.freeze()
        self._rate = rate

    def estimate(self, schedule_scale: float = 1.0) -> NoiseEstimate:
        """Return the estimates after an update.

        Args:
            schedule_scale: factor on the learning rate of the optimizer, >= 0.
        """
        V, assumed = self._variance()
        K, P = self._K, self._to_go.update()
        has_fallen = self._to_go.has_fallen
        if self._to_go.count < FIRST_GRADIENTS or not (V >= 0 and P > 0):
            return NoiseEstimate(variance=V, to_go=P, phi=K * FIRST_PHI, has_fallen=has_fallen, assumed=assumed)
        r = self._whole_rate() * schedule_scale * V / (2 * K * P)
        if not r >= 0:
            return NoiseEstimate(
                variance=V,
                to_go=P,
                phi=K * FIRST_PHI,
                has_fallen=has_fallen,
                assumed="the size of the optimizer's steps is unknown",
            )
        r = min(LARGEST_NOISE_SHARE, r)  # so that phi <= LARGEST_PHI * K
        phi = max(K * LEAST_PHI, K * r / (1 - r))
        return NoiseEstimate(
            variance=V,
            to_go=P,
            phi=phi,
            has_fallen=has_fallen,
            assumed=assumed,
            noise_scale=self._noise_scale(V) if self._adaptive else None,
        )

    def _noise_scale(self, V: float) -> float:
        return V / max(self._signal.mean, LEAST_PHI * V / self._K, 1e-300)

    def _variance(self) -> tuple[float, str]:
        """Return V, and what is assumed."""
        if self._within.count:
            return self._within.mean, ""
        if self._between.count:
            return max(0.0, self._between.mean), ""
        if self._squares.count:
            return self._squares.mean, "the variance of a gradient is its mean squared norm"
        return nan, "the variance of a gradient is unknown"

    def _whole_rate(self) -> float:
        """Return the rate of a whole movement at the reference."""
        if not self._adaptive:
            return self._rate / (1 - self._momentum)
        return self._along.mean / self._norms.mean if self._norms.mean > 0 else nan
