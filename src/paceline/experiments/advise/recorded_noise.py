"""Gradient noise of a DDP recording, and the updates that other protocols need for the same loss."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import mean
from typing import NamedTuple

from paceline.ddp_recording.recording import GradientSample


class NoiseScale(NamedTuple):
    """Noise of gradients.

    Attributes:
        variance: variance V of a rank's gradient, >= 0.
        squared_norm: squared norm N of the gradient of the loss, >= 0.
        ranks: number n of gradients in an update of DDP.
    """

    variance: float
    squared_norm: float
    ranks: int

    @property
    def ratio(self) -> float:
        """Ratio phi = V / N, in gradients; inf if noise hides the gradient."""
        return self.variance / self.squared_norm if self.squared_norm else (inf if self.variance else 0.0)

    def relative_updates(self, k: float, price: float = 1.0) -> float:
        """Return the updates that a protocol needs for the progress of one update of DDP.

        ``(d + phi / k) / (1 + phi / n)``

        An update of k gradients makes the progress k / (k d + phi) under the rule "noise", and one of DDP makes
        n / (n + phi).

        Args:
            k: mean number of gradients in an update, > 0.
            price: price of staleness d, >= 1; see ``StalenessPrice``.

        >>> NoiseScale(variance=8.0, squared_norm=1.0, ranks=4).relative_updates(k=2)
        1.6666666666666667
        """
        phi = self.ratio
        return self.ranks / k if phi == inf else (price + phi / k) / (1 + phi / self.ranks)


def noise_scale(samples: Sequence[GradientSample], ranks: int) -> NoiseScale:
    """Return the noise of sampled steps.

    ``V = n / (n - 1) (mean ||g_j||^2 - ||g||^2)`` and ``N = ||g||^2 - V / n``, each a mean over the steps.

    Args:
        samples: one sample or more.
        ranks: number of ranks n, >= 2.

    Source: Xu et al. (DBW) 2020, eq. (10) and (11).
    """
    variance = max(0.0, mean(ranks / (ranks - 1) * (each.mean_square - each.squared_norm) for each in samples))
    squared_norm = max(0.0, mean(each.squared_norm for each in samples) - variance / ranks)
    return NoiseScale(variance, squared_norm, ranks)
