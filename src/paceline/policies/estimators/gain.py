"""How much an update of k gradients is expected to lower the loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf, isfinite, nan
from numbers import Integral
from typing import Any, NamedTuple

from paceline.core.events import Step
from paceline.utils.validation import check_range


class GainInput(NamedTuple):
    """What the gradients of one update tell.

    Attributes:
        k: how many they were.
        loss: F, the mean loss of their minibatches.
        mean_square: mean of their squared norms, weighted by samples as the mean gradient is.
        within: mean of the variances that the workers saw in their own microbatches; nan without any.
        step: that was made of their mean g.
    """

    k: int
    loss: float
    mean_square: float
    within: float
    step: Step


class GainEstimator:
    """Estimates the gain G_k, the expected decrease of the loss by an update of k gradients.

    After an update of k gradients g_j with the mean g, at a loss F, and the one before (marked ')

        V+ = k / (k - 1) (mean ||g_j||^2 - ||g||^2)                                             (10)
        N+ = max(||g||^2 - V+ / k, 0)                                                           (11)
        L+ = 2 (eta' N' - (F' - F)) / (rho' (N' + V' / k'))                                     (12)

    are taken for the variance of a gradient, the squared norm of the loss's own gradient and the loss's
    smoothness. V, N and L are the means of the last D of them (13-15), L not below 0, and

        G_k = (eta_k - L rho_k / 2) N - L rho_k / 2  V / k.                                     (16)

    Source: Xu, Neglia, Sebastianelli (DBW) 2020, Sect. 3.1.

    Differs from the paper:
        - A step s is measured as it was made: eta = g.s / ||g||^2 and rho = ||s||^2 / ||g||^2. With plain SGD they
          are the learning rate and its square, as in the paper. The next step is assumed to be as much longer than
          plain SGD's, along the gradient and in all, as the latest one was.
        - The rate of the next step is used, which a schedule may have changed, and which may depend on k.
        - A single gradient has no V+, and so neither N+ nor L+, unless its worker has seen the variance in its
          microbatches. Such an update tells nothing, and nor does its loss: V, N and L are means over the last D
          updates that have told them. (Taking N+ with the mean V, or L+ from the losses of single gradients, was
          tried: their noise is larger than what they tell; see papers/dbw.)
        - Minibatches may be of different sizes: all means are weighted by samples, and V+ is without bias then, too.
        - What is not finite is left out, and a gain that is too large or too small for a number is none.

    Args:
        D: updates that each mean is over, >= 1.
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
        """Variance of a gradient; nan if nothing is known."""
        return _mean(self._variances)

    @property
    def squared_norm(self) -> float:
        """Squared norm of the loss's gradient; nan if nothing is known."""
        return _mean(self._squared_norms)

    @property
    def smoothness(self) -> float:
        """Smoothness of the loss, >= 0; nan if nothing is known."""
        mean = _mean(self._smoothnesses)
        return max(mean, 0.0) if isfinite(mean) else nan

    def observe(self, told: GainInput) -> None:
        """Take in what an update has told."""
        self._stretch = _stretch(told.step) or self._stretch
        before, self._latest = self._latest, None
        k, squared_norm = told.k, told.step.squared_norm
        variance = max(k / (k - 1) * (told.mean_square - squared_norm), 0.0) if k > 1 else told.within
        if not isfinite(variance):
            return
        if before is not None:
            _keep(self._smoothnesses, self._smoothness(before, told.loss))
        _keep(self._variances, variance)
        _keep(self._squared_norms, max(squared_norm - variance / k, 0.0))
        self._latest, self._latest_V = told, variance

    def gains(self, rates: Sequence[float]) -> list[float] | None:
        """Return G_1 ... G_n; None as long as too little is known.

        Args:
            rates: the learning rate of an update of k gradients, for k = 1 ... n.

        Returns:
            Finite gains, or -inf where one is beyond all numbers because training has exploded; never nan.
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
        """Return everything that was told and still counts."""
        return {
            "windows": [list(window) for window in self._windows()],
            "latest": self._latest and tuple(self._latest),
            "latest_V": self._latest_V,
            "stretch": self._stretch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        for window, values in zip(self._windows(), state["windows"], strict=True):
            window.extend(values)
        self._latest = state["latest"] and GainInput(*state["latest"])
        self._latest_V = state["latest_V"]
        self._stretch = state["stretch"]

    def _windows(self) -> tuple[deque[float], ...]:
        return self._variances, self._squared_norms, self._smoothnesses

    def _smoothness(self, before: GainInput, loss: float) -> float:
        """Return L+ of the update before, now that the loss after it is known; nan if its step tells nothing."""
        k, step, V = before.k, before.step, self._latest_V
        N = max(step.squared_norm - V / k, 0.0)
        if not step.squared_norm:
            return nan
        eta, rho = step.progress / step.squared_norm, step.squared_step / step.squared_norm
        expected = rho * (N + V / k)
        return 2 * (eta * N - (before.loss - loss)) / expected if 0 < expected < inf else nan


def _stretch(step: Step) -> tuple[float, float] | None:
    """Return how much longer than plain SGD's a step was, along the gradient and, squared, in all."""
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
