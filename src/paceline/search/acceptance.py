"""Whether the trial runs of a switch point keep the accuracy that was asked for. Numbers in, one word out."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

ROUNDING = 1e-12  # of accuracies: equal decimals are equal, in whichever order they were added


def accepts(accuracies: Sequence[float | None], target: float, margin: float, two_sided: bool = False) -> bool:
    """Return whether the mean of the accuracies is at least target - margin.

    Args:
        accuracies: of the trial runs, shares; None or nan for a run that has diverged, which fails them all.
        target: accuracy to be kept, a share.
        margin: by which the mean may fall short, a share.
        two_sided: whether the mean may not be above target + margin either, as Algorithm 1 is printed.

    A mean that is off by the margin exactly is accepted, though in binary 0.021 - 0.01 is more than 0.011.

    Example:
        >>> accepts([0.92, 0.93], target=0.93, margin=0.01), accepts([0.92, None], target=0.93, margin=0.01)
        (True, False)
        >>> accepts([0.97], target=0.93, margin=0.01), accepts([0.97], target=0.93, margin=0.01, two_sided=True)
        (True, False)

    Source: Li et al. (Sync-Switch), ICDCS 2021, Algorithm 1, line 13. Differs: one-sided by default, because a switch
    point is no worse for being more accurate than BSP.
    """
    finished = [accuracy for accuracy in accuracies if accuracy is not None and isfinite(accuracy)]
    if len(finished) < len(accuracies) or not finished:
        return False
    mean = sum(finished) / len(finished)
    margin += ROUNDING
    return mean >= target - margin and not (two_sided and mean > target + margin)
