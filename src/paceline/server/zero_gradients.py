"""Detection of trainable parameters whose gradient stays zero."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from paceline.core.events import Apply
from paceline.errors import PacelineWarning

GRADIENTS = 10
NAMES_SHOWN = 5


class ZeroGradientMonitor:
    """Warning about parameters whose gradient was None or zero in each of the first 10 accepted gradients.

    All gradients of the first version count as one: they are computed at the initial parameters, where some gradients
    are zero by design (A of LoRA, while B is zero). So at least 10 gradients are inspected, 9 of them computed after
    an update.

    Args:
        job: name of the job.
        names: names of the server's trainable parameters, in the order of their gradients.
    """

    def __init__(self, job: str, names: Sequence[str]) -> None:
        self._job = job
        self._count = len(names)
        self._zero = dict(enumerate(names))
        self._left = GRADIENTS - 1

    @property
    def is_over(self) -> bool:
        """Whether every parameter had a nonzero gradient, or the warning was given."""
        return not self._zero or self._left <= 0

    def observe(self, mean: Sequence[Tensor], accumulated: int, update: Apply) -> None:
        """Inspect the mean gradient of an update, before the optimizer steps with it.

        Args:
            mean: gradient of each parameter.
            accumulated: gradients accumulated by the server itself, >= 0; an all-reduce enqueues a single sum.
            update: update with the staleness of each gradient.
        """
        for i in [i for i in self._zero if bool(mean[i].any())]:
            del self._zero[i]
        base = update.version - 1
        self._left -= min(accumulated, sum(accepted.staleness < base for accepted in update.gradients))
        if self._zero and self._left <= 0:
            self._warn()

    def _warn(self) -> None:
        warnings.warn(
            f"job {self._job}: the gradient of {len(self._zero)} of {self._count} trainable parameters "
            f"({shortened(list(self._zero.values()))}) was None or zero in each of the first {GRADIENTS} accepted "
            "gradients, so they are not trained; check that the loss depends on them, or set requires_grad=False",
            PacelineWarning,
            stacklevel=2,
        )


def shortened(names: Sequence[str]) -> str:
    """Return at most five names, and the number of the others.

    >>> shortened(["a", "b"]), shortened(list("abcdefgh"))
    ('a, b', 'a, b, c, d, e and 3 more')
    """
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
