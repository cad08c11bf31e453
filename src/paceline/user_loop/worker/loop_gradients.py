"""Gradients that the user's own loop computes, in another thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import nan

from torch import nn

from paceline.core.events import Minibatch
from paceline.jobs.job import Batch
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.user_loop.worker.exchange import Exchange, LoopAnswer, LoopTask
from paceline.worker.gradient_source import GradientSource, OnReady, PartialGradient
from paceline.worker.minibatch_forecast import UpcomingMinibatch
from paceline.worker.task_progress import TaskProgress


class LoopGradients(GradientSource):
    """Gradients of the user's loop, which loads the samples of each minibatch.

    Args:
        ahead: minibatches that the rank loads ahead, >= 0.
        exchange: exchange with the loop.
        is_shared: whether the ranks of a host share each minibatch, so that an interrupt reaches all of them with the
            sum of their gradients, and none before.
        is_summed_early: whether the sum of a gradient may begin before it is complete, and be made again.
    """

    def __init__(
        self, ahead: int, exchange: Exchange, *, is_shared: bool = False, is_summed_early: bool = False
    ) -> None:
        self._exchange = exchange
        self._is_shared = is_shared
        self._is_summed_early = is_summed_early
        self._check: Callable[[], None] = lambda: None
        self._ahead = ahead
        self._known: tuple[UpcomingMinibatch, ...] = ()
        self._local_step = 0  # of the next gradient

    @property
    def prefetches(self) -> bool:
        """Whether minibatches are prepared ahead: by the loop, and not here."""
        return False

    def prefetch(self, known: Iterable[UpcomingMinibatch]) -> None:
        """Set the forecast of the minibatches that follow the next one."""
        self._known = tuple(known)

    def set_check(self, check: Callable[[], None]) -> None:
        """Let the loop call a function."""
        if not self._is_shared:
            self._check = check

    def begin_local_step(self, worker: int, draw: int, minibatch: Minibatch | None, steps: int) -> None:
        """Set the forecast of the minibatches that follow in the same work."""
        self._local_step = steps
        if minibatch is None:
            return
        last = min(minibatch.length, steps + 1 + self._ahead)
        following = [minibatch.after(number)._replace(length=1) for number in range(steps + 1, last)]
        self._known = tuple(UpcomingMinibatch(worker, draw, each) for each in following)

    def load(self, worker: int, draw: int, minibatch: Minibatch | None) -> Batch:
        """Return the number of a minibatch, and those of the forecast; the loop loads the samples."""
        return [minibatch, *(each.minibatch for each in self._known)]

    def compute(
        self,
        model: nn.Module,
        batch: Batch | None,
        gradient: FlatBuffers,
        progress: TaskProgress,
        on_ready: OnReady | None,
    ) -> PartialGradient:
        """Wait for the gradient of the loop.

        Raises:
            Interrupted: the task is cancelled, or the loop pauses or has ended.
        """
        assert batch is not None
        minibatch, *upcoming = batch
        self._check()
        task = LoopTask(
            minibatch=minibatch,
            upcoming=tuple(upcoming),
            model=model,
            gradient=gradient,
            progress=progress,
            check=self._check,
            step=self._local_step,
            on_ready=on_ready if self._is_summed_early else None,
        )
        answer = self._exchange.ask(task)
        assert isinstance(answer, LoopAnswer)
        self._check()
        return PartialGradient(
            loss=nan if answer.loss is None else answer.loss,
            samples=answer.samples,
            squared_norms=answer.squared_norms,
            is_loss_known=answer.loss is not None,
            skipped=answer.skipped,
            overflowed=answer.overflowed,
            learning_rates=answer.learning_rates,
            options=answer.options,
            weight=answer.weight,
            minibatches=answer.minibatches,
            step_place=answer.step_place,
        )

    def close(self) -> None:
        """Do nothing: the loop ends the processes of its DataLoader."""
