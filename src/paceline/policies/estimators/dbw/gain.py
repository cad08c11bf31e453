"""Gain estimation: the expected decrease of the loss by an update of k gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf, isfinite, nan
from numbers import Integral
from typing import Any, NamedTuple

from paceline.core.events import Step
from paceline.utils.validation import check_range


class GainInput(NamedTuple):
    """Statistics of the gradients of one update.

    Attributes:
        k: number of gradients, >= 1.
        loss: mean loss F of their minibatches.
        mean_square: mean of their squared norms, weighted by samples like the mean gradient.
        within: mean of the variances that the workers measured over their microbatches; nan without microbatches.
        step: measured step of their mean g.
    """

    k: int
    loss: float
    mean_square: float
    within: float
    step: Step


class GainEstimator:
    """Estimator of the gain G_k, the expected decrease of the loss by an update of k gradients.

    For an update of k gradients g_j with mean g at loss F, and the update before it (marked '),

        V+ = k / (k - 1) (mean ||g_j||^2 - ||g||^2)                                             (10)
        N+ = max(||g||^2 - V+ / k, 0)                                                           (11)
        L+ = 2 (eta' N' - (F' - F)) / (rho' (N' + V' / k'))                                     (12)

    estimate the variance of a gradient, the squared norm of the gradient of the loss, and the smoothness of the loss.
    V, N and L are the means of the last D of each (13-15), with L >= 0, and

        G_k = (eta_k - L rho_k / 2) N - L rho_k / 2  V / k.                                     (16)

    Source: Xu, Neglia, Sebastianelli (DBW) 2020, Sect. 3.1.

    Differs from the paper:
        - The actual step s is measured: eta = g.s / ||g||^2 and rho = ||s||^2 / ||g||^2. With plain SGD these are the
          learning rate and its square, as in the paper. The next step is assumed to differ from plain SGD's by the
          same factors as the latest one, along the gradient and in total length.
        - The learning rate of the next step is used, which may follow a schedule or depend on k.
        - An update of a single gradient has no V+, and so neither N+ nor L+, unless its worker measured the variance
          over microbatches. V, N and L are means over the last D updates that have a value. (N+ with the mean V, and
          L+ from the losses of single gradients, were tried: the noise was larger than the signal; see papers/dbw.)
        - Minibatches may have different sizes: all means are weighted by samples, and V+ stays unbiased.
        - Values that are not finite are dropped. A gain that overflows is -inf.

    Args:
        D: number of latest values in each mean, >= 1.
    """

    def __init__(self, D: int) -> None:
        check_range("[1, inf)", Integral, D=D)
        self._variances: deque[float] = deque(maxlen=D)
        self._squared_norms: deque[float] = deque(maxlen=D)
        self._smoothnesses: deque[float] = deque(maxlen=D)
        self._latest: GainInput | None = None
        self._latest_V = nan
        self._stretch = (1.0, 1.0)

    @property
    def variance(self) -> float:
        """Variance V of a gradient; nan without a value."""
        return _mean(self._variances)

    @property
    def squared_norm(self) -> float:
        """Squared norm N of the gradient of the loss; nan without a value."""
        return _mean(self._squared_norms)

    @property
    def smoothness(self) -> float:
        """Smoothness L of the loss, >= 0; nan without a value."""
        mean = _mean(self._smoothnesses)
        return max(mean, 0.0) if isfinite(mean) else nan

    def observe(self, update: GainInput) -> None:
        """Add the statistics of an update."""
        self._stretch = _stretch(update.step) or self._stretch
        before, self._latest = self._latest, None
        k, squared_norm = update.k, update.step.squared_norm
        variance = variance_of(update)
        if not isfinite(variance):
            return
        if before is not None:
            _keep(self._smoothnesses, self._smoothness(before, update.loss))
        _keep(self._variances, variance)
        _keep(self._squared_norms, max(squared_norm - variance / k, 0.0))
        self._latest = update
        self._latest_V = variance

    def gains(self, rates: Sequence[float]) -> list[float] | None:
        """Return the gains G_1 ... G_n; None before V, N and L have values.

        Args:
            rates: learning rates of an update of k gradients, for k = 1 ... n.

        Returns:
            Gains, finite or -inf where one overflows because training has diverged; never nan.
        """
        V, N, L = self.variance, self.squared_norm, self.smoothness
        if not all(map(isfinite, (V, N, L))):
            return None
        along, squared = self._stretch
        gains = []
        for k, rate in enumerate(rates, start=1):
            loss_by_curvature = L * squared * rate * rate / 2
            gain = (along * rate - loss_by_curvature) * N - loss_by_curvature * V / k
            gains.append(gain if isfinite(gain) else -inf)
        return gains

    def state_dict(self) -> dict[str, Any]:
        """Return the values that still count, and the latest update."""
        return {
            "windows": [list(window) for window in self._windows()],
            "latest": self._latest and tuple(self._latest),
            "latest_V": self._latest_V,
            "stretch": self._stretch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        for window, values in zip(self._windows(), state["windows"], strict=True):
            window.extend(values)
        self._latest = state["latest"] and GainInput(*state["latest"])
        self._latest_V = state["latest_V"]
        self._stretch = state["stretch"]

    def _windows(self) -> tuple[deque[float], ...]:
        return self._variances, self._squared_norms, self._smoothnesses

    def _smoothness(self, before: GainInput, loss: float) -> float:
        """Return L+ of the update before, given the loss after it; nan if its gradient is 0."""
        k, step, V = before.k, before.step, self._latest_V
        N = max(step.squared_norm - V / k, 0.0)
        if not step.squared_norm:
            return nan
        eta, rho = step.progress / step.squared_norm, step.squared_step / step.squared_norm
        expected = rho * (N + V / k)
        return 2 * (eta * N - (before.loss - loss)) / expected if 0 < expected < inf else nan


def variance_of(update: GainInput) -> float:
    """Return the variance V+ of a gradient, from the gradients of one update (10); nan for one without microbatches."""
    if update.k > 1:
        return max(update.k / (update.k - 1) * (update.mean_square - update.step.squared_norm), 0.0)
    return update.within


def _stretch(step: Step) -> tuple[float, float] | None:
    """Return the ratios of a step to plain SGD's: of the lengths along the gradient, and of the squared lengths."""
    plain = step.learning_rate * step.squared_norm
    if not plain > 0:
        return None
    along, squared = step.progress / plain, step.squared_step / plain / step.learning_rate
    return (along, squared) if isfinite(along) and isfinite(squared) else None


def _keep(window: deque[float], value: float) -> None:
    if isfinite(value):
        window.append(value)


def _mean(window: deque[float]) -> float:
    return sum(window) / len(window) if window else nan
