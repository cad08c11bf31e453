"""Gradients that the user's own loop computes, in another thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import nan

from torch import nn

from paceline.core.events import Minibatch
from paceline.jobs.job import Batch, Job
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.user_loop.worker.exchange import Exchange, Lease, LoopAnswer, LoopTask
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.gradient_source import GradientSource, PartialGradient
from paceline.worker.minibatch_forecast import UpcomingMinibatch
from paceline.worker.task_progress import TaskProgress


class LoopGradients(GradientSource):
    """Gradients of the user's loop, to which each minibatch is a lease of samples.

    Args:
        job: described job.
        seed: seed of the run, >= 0.
        n: workers of the run, >= 1.
        exchange: exchange with the loop.
    """

    def __init__(self, job: Job, seed: int, n: int, exchange: Exchange) -> None:
        self._exchange = exchange
        self._check: Callable[[], None] = lambda: None
        self._loader = MinibatchLoader(job, seed, n)
        self._ahead = job.minibatches_ahead
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
        self._check = check

    def begin_local_step(self, worker: int, draw: int, minibatch: Minibatch | None, steps: int) -> None:
        """Set the forecast of the minibatches that follow in the same work."""
        assert minibatch is not None
        self._local_step = steps
        last = min(minibatch.length, steps + 1 + self._ahead)
        following = [minibatch.after(number)._replace(length=1) for number in range(steps + 1, last)]
        self._known = tuple(UpcomingMinibatch(worker, draw, each) for each in following)

    def load(self, worker: int, draw: int, minibatch: Minibatch | None) -> Batch:
        """Return the lease of a minibatch, and those of the forecast."""
        first = UpcomingMinibatch(worker, draw, minibatch)
        return [self._lease(*each) for each in (first, *self._known)]

    def compute(
        self,
        model: nn.Module,
        batch: Batch | None,
        gradient: FlatBuffers,
        progress: TaskProgress,
        on_ready: Callable[[int], None] | None,
    ) -> PartialGradient:
        """Wait for the gradient of the loop.

        Raises:
            Interrupted: the task is cancelled, or the loop pauses or has ended.
        """
        assert batch is not None
        lease, *upcoming = batch
        self._check()
        task = LoopTask(
            lease=lease,
            upcoming=tuple(upcoming),
            model=model,
            gradient=gradient,
            progress=progress,
            check=self._check,
            step=self._local_step,
        )
        answer = self._exchange.ask(task)
        assert isinstance(answer, LoopAnswer)
        self._check()
        return PartialGradient(
            loss=nan if answer.loss is None else answer.loss,
            samples=len(lease.indices),
            squared_norms=answer.squared_norms,
            is_loss_known=answer.loss is not None,
            skipped=answer.skipped,
            overflowed=answer.overflowed,
            learning_rates=answer.learning_rates,
            options=answer.options,
            weight=answer.weight,
        )

    def close(self) -> None:
        """Do nothing: the loop ends the processes of its DataLoader."""

    def _lease(self, worker: int, draw: int, minibatch: Minibatch | None) -> Lease:
        assert minibatch is not None
        return Lease(minibatch, self._loader.indices(worker, draw, minibatch))
