"""Progress of an attached run, as its rank sees it."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

from paceline.worker.replica import TaskProgress


class LastGradient(NamedTuple):
    """What became of the previous gradient of a rank.

    Attributes:
        fate: "used" in an update, "late" if it came too late for one, "interrupted", "skipped" because the loop skipped
            its step, or "not finite"; empty before the first gradient, and without a server.
        staleness: staleness in versions of a gradient that was used, else 0.
    """

    fate: str
    staleness: int


class LoopProgress:
    """Progress and end of a run.

    Args:
        optimizer: optimizer of the user.

    Attributes:
        over: whether the run has ended, for this rank at least; at the end of the run the model is the last version.
        stopped_by: condition that ended the run, empty before its end.
        reason: reason for the end as a sentence, empty before it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.over = False
        self.stopped_by = self.reason = ""
        self._optimizer = optimizer
        self._progress = TaskProgress()

    def __enter__(self) -> Self:
        return self

    @property
    def update(self) -> int:
        """Updates that the parameters of this rank contain, >= 0."""
        return self._progress.update

    @property
    def workload(self) -> int:
        """Gradients of all ranks in these updates, >= 0."""
        return self._progress.workload

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def last(self) -> LastGradient:
        """What became of the previous gradient of this rank."""
        return LastGradient(self._progress.last, self._progress.staleness)
