"""Attached run: what the loop of a user does with its part in a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from paceline.worker.task_progress import TaskProgress


class LastGradient(NamedTuple):
    """What became of the previous gradient of a rank.

    Attributes:
        fate: "used" in an update, "late" if it came too late for one, "interrupted", "skipped" because the loop skipped
            its step, "not finite", or "dropped" with its whole update, in which another gradient is not finite; empty
            before the first gradient, and without a server.
        staleness: staleness in versions of a gradient that was used, else 0.
    """

    fate: str
    staleness: int


class AttachedRun(ABC):
    """Part of one rank in a run.

    The run begins with the first batch, or with `epochs`.

    Args:
        optimizer: optimizer of the user.

    Attributes:
        loader: batches of this rank; each iteration is one epoch. A loop without a loader iterates over `steps`.
        over: whether the run has ended, for this rank at least; at the end of the run the model is the last version.
        stopped_by: condition that ended the run, empty before its end.
        reason: reason for the end as a sentence, empty before it.
        ends_together: whether all ranks end the run with the same step, so that none waits for another one.
        stepped: whether the newest ``optimizer.step()`` made an update, so that the parameters are those of a later
            version. Under ``balanced`` it is the last one of several.
    """

    loader: Iterable[Any]
    ends_together: bool
    stepped = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.over = False
        self.stopped_by = self.reason = ""
        self._optimizer = optimizer
        self._progress = TaskProgress()

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        """Finish the run, or leave it with the error of the block."""

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

    @abstractmethod
    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs, and finish the run after the last one.

        Args:
            count: number of epochs, >= 1; it ends the run unless `stop` was given.
        """

    @abstractmethod
    def steps(self, count: int | None = None) -> Iterator[int]:
        """Yield the numbers of the steps of a loop without a loader, and finish the run after the last one.

        Args:
            count: steps of each of equally fast ranks, >= 1; their gradients end the run unless `stop` was given. None
                for a run that `stop` ends.
        """

    @abstractmethod
    def begin_epoch(self, epoch: int) -> None:
        """Take minibatches until the end of this epoch, or of that of the next one if it is a later epoch."""

    @abstractmethod
    def minibatch(self) -> AbstractContextManager[Any]:
        """Return a block for the code of one batch, which ends between two layers when the protocol interrupts it.

        The loop goes on after the block and takes its next batch, with the newest version. Without the block a rank
        that is interrupted finishes its step, whose gradient is not sent.
        """

    @abstractmethod
    def pause(self) -> AbstractContextManager[None]:
        """Let the other ranks go on without this one, as during a long evaluation; afterwards load the newest version.

        Raises:
            RunError: a batch was taken, but ``optimizer.step()`` was not called yet.
        """

    @abstractmethod
    def skip(self) -> None:
        """Drop what the loop has computed of its next step, which is left out unless another gradient follows."""

    @abstractmethod
    def weight(self, weight: float | Tensor) -> None:
        """Set what the gradient of this step counts in the mean of an update; several calls of a step add up.

        So the loss of an update is the mean over all tokens of its batches, where that of DistributedDataParallel is
        the mean of the ranks' means. A gradient of weight 0 is skipped.

        Args:
            weight: number that the loss is a mean over, as its tokens that count, >= 0; its samples if no step says it.

        Raises:
            UsageError: it is negative or not finite, or the protocol has no such mean.
        """

    @abstractmethod
    def backward(self, loss: Tensor, **options: Any) -> None:
        """Call ``loss.backward``, in loops whose loss attach cannot see.

        Args:
            loss: mean loss of a batch, divided by the number of batches of a step, a scalar.
            options: arguments of `Tensor.backward`.
        """

    @abstractmethod
    def set_scheduler(self, scheduler: LRScheduler) -> None:
        """Let a scheduler follow the workload of the run, so that it agrees on all ranks; as ``scheduler`` of `attach`.

        Raises:
            UsageError: the scheduler follows a metric.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the run for all ranks, from rank 0; the model is the last version then.

        Raises:
            UsageError: this is not rank 0 of a run with a server.
        """

    @abstractmethod
    def finish(self) -> None:
        """Take no further part in the run; the model is the last version if the run has ended.

        Rank 0 waits for the other ranks, because the server runs beside it. Then the optimizer steps as before the run.
        """

    @abstractmethod
    def release(self) -> None:
        """Remove the hooks of a run that has ended from the optimizer, the scheduler and the model."""
