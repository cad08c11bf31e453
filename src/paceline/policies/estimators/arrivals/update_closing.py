"""When an update is to be closed: gain of an update of k gradients, gain per second, and the best time to wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.utils.state_dict import Stateful

UPDATES = 100  # latest updates that count, by exponential weights


def gain(k: float, phi: float) -> float:
    """Return the gain of an update of k >= 0 gradients, k / (k + phi), as a share of one without noise.

    Args:
        k: number of gradients, >= 0.
        phi: critical number of gradients, > 0; see `CriticalBatch`.

    >>> gain(10, phi=10)
    0.5
    """
    return k / (k + phi)


class Wait(NamedTuple):
    """Decision to wait or to close.

    Attributes:
        horizon_s: seconds after which to decide again; 0 to close the update now.
        gain_per_s: largest expected gain per second of waiting.
    """

    horizon_s: float
    gain_per_s: float


def best_wait(
    held: int, phi: float, gain_per_s: float, horizons_s: Sequence[float], arrivals: NDArray[np.float64]
) -> Wait:
    """Return the wait that pays most, or none.

    Waiting pays if for some horizon h

        g(m + A(h)) - g(m) > S h,    g(m) = m / (m + phi),

    with m gradients held, A(h) expected arrivals within h, and S the gain per second that the run makes.

    Args:
        held: number of gradients held, >= 0.
        phi: critical number of gradients, > 0.
        gain_per_s: S, >= 0.
        horizons_s: horizons in seconds, > 0, at least one.
        arrivals: expected number of arrivals within each horizon.

    >>> best_wait(1, 10.0, 0.05, [1.0, 2.0], np.array([2.0, 2.5])).horizon_s
    1.0
    >>> best_wait(1, 10.0, 0.2, [1.0, 2.0], np.array([2.0, 2.5])).horizon_s
    0
    """
    waits_s = np.asarray(horizons_s, dtype=float)
    gains = (held + arrivals) / (held + arrivals + phi) - gain(held, phi)
    surplus = gains - gain_per_s * waits_s
    best = int(surplus.argmax())
    return Wait(float(waits_s[best]) if surplus[best] > 0 else 0, float((gains / waits_s).max()))


def largest_gain_per_s(phi: float, horizons_s: Sequence[float], arrivals: Sequence[float]) -> float:
    """Return max_h g(A(h)) / h: the gain per second of updates that each take the best horizon.

    Args:
        phi: critical number of gradients, > 0.
        horizons_s: horizons in seconds, > 0, at least one.
        arrivals: expected number of arrivals within each horizon from the beginning of an update.

    >>> largest_gain_per_s(10.0, [1.0, 2.0], [5.0, 30.0])
    0.375
    """
    return max(gain(each, phi) / horizon_s for horizon_s, each in zip(horizons_s, arrivals, strict=True))


class GainPerSecond(Stateful):
    """Gain per second of the latest updates, for any phi.

    The number of gradients of each update is kept instead of its gain, because phi changes while training runs. Of
    the first 100 updates the i-th has the weight i; from then on the weights fall exponentially with the age.

    Example:
        >>> rate = GainPerSecond()
        >>> rate.add(10, 2.0)
        >>> rate.value(phi=10)
        0.25
    """

    _saved = ("_updates", "_seconds", "_weights")

    def __init__(self) -> None:
        self._updates = 0
        self._seconds = 0.0
        self._weights: dict[int, float] = {}  # of updates by number of gradients

    def add(self, k: int, seconds: float) -> None:
        """Add an update of k >= 1 gradients and its seconds, >= 0."""
        self._updates += 1
        factor = 1.0 - 1.0 / min(self._updates, UPDATES)
        self._seconds = factor * self._seconds + seconds
        self._weights = {each: factor * weight for each, weight in self._weights.items() if factor * weight > 1e-6}
        self._weights[k] = self._weights.get(k, 0.0) + 1.0

    def value(self, phi: float) -> float:
        """Return the gain per second; 0 before the first update."""
        total = sum(weight * gain(k, phi) for k, weight in self._weights.items())
        return total / self._seconds if self._seconds > 0 else 0.0
