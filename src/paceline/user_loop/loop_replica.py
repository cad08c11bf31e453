"""Replica of a rank whose gradients the user's own loop computes, in another thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite, nan
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.core.bounds import Option
from paceline.core.events import CTRL_C, Minibatch, Outcome
from paceline.engines.distributed import End, HostProcess
from paceline.jobs.job import Batch, Job
from paceline.protocols.local_steps import LocalSteps
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.kept_values import KeptValues
from paceline.worker.minibatch_forecast import UpcomingMinibatch
from paceline.worker.replica import GradientStats, Interrupted, PartialGradient, Replica, TaskProgress

CHECK_S = 1.0


class Lease(NamedTuple):
    """Minibatch of a rank.

    Attributes:
        minibatch: number of the minibatch.
        indices: its samples.
    """

    minibatch: Minibatch
    indices: NDArray[np.int64]


class LoopTask(NamedTuple):
    """Task of the user's loop.

    Attributes:
        lease: minibatch of the task.
        upcoming: forecast of the minibatches that follow.
        model: parameters and buffers of the version; buffers are changed in place.
        gradient: flat buffers for the gradient.
        progress: progress of the run.
        check: function that raises `Interrupted` if the task is interrupted.
        step: local steps before this minibatch in the same work, >= 0.
    """

    lease: Lease
    upcoming: tuple[Lease, ...]
    model: nn.Module
    gradient: FlatBuffers
    progress: TaskProgress = TaskProgress()
    check: Callable[[], None] = lambda: None
    step: int = 0

    @property
    def is_interrupted(self) -> bool:
        """Whether the protocol has interrupted the task."""
        try:
            self.check()
        except Interrupted:
            return True
        return False

    @property
    def epoch(self) -> int:
        """Epoch of the minibatch, >= 0."""
        assert self.lease.minibatch.epoch is not None
        return self.lease.minibatch.epoch


class LoopAnswer(NamedTuple):
    """Gradient of a task, which has been written.

    Attributes:
        loss: mean loss of the samples, None if it is not known.
        learning_rates: learning rate of each parameter group for the step of this gradient.
        options: other options of each parameter group, which the loop or a scheduler may change.
        skipped: whether the loop skipped the step, as for a gradient that is not finite.
        squared_norms: squared norm of each parameter's gradient that is known, by index.
    """

    loss: float | None
    learning_rates: tuple[float, ...]
    options: tuple[dict[str, Option], ...]
    skipped: bool = False
    squared_norms: Mapping[int, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class LoopStep:
    """Step that the user's optimizer is to make, with the gradients in place; the loop returns it afterwards."""


@dataclass(frozen=True)
class LoopPause:
    """Pause of the loop, in place of the gradient of its task."""


class LoopEnd(NamedTuple):
    """End of the run.

    Attributes:
        model: final parameters and buffers, None if the run ended before this rank took part.
        end: how the run ended.
    """

    model: nn.Module | None
    end: End


class Exchange:
    """Exchange between the thread of the worker and the user's loop, of which one waits for the other.

    Attributes:
        to_loop: tasks, steps of the user's optimizer where it steps, and then the end of the run or an error.
        to_worker: answers, steps that were made, and pauses; None if the loop has ended.
        has_begun: whether the loop has had a task.
        kept: what the loop keeps between tasks; None for nothing.
    """

    def __init__(self) -> None:
        self.to_loop: queue.SimpleQueue[LoopTask | LoopStep | LoopEnd | BaseException] = queue.SimpleQueue()
        self.to_worker: queue.SimpleQueue[LoopAnswer | LoopStep | LoopPause | None] = queue.SimpleQueue()
        self.has_begun = False
        self.kept: KeptValues | None = None
        self._has_ended = False

    def message(
        self, look: Callable[[], LoopEnd | BaseException | None]
    ) -> LoopTask | LoopStep | LoopEnd | BaseException:
        """Wait for the next message to the loop; a function returns what ends the wait if none can come any more."""
        while True:
            try:
                return self.to_loop.get(timeout=CHECK_S)
            except queue.Empty:
                found = look()
            if found is not None:
                return found

    def ask(self, what: LoopTask | LoopStep) -> LoopAnswer | LoopStep:
        """Send a task or a step to the loop, and wait for what it returns.

        Raises:
            Interrupted: the loop pauses, or has ended.
        """
        if not self._has_ended:
            self.has_begun = True
            self.to_loop.put(what)
            answer = self.to_worker.get()
            if isinstance(answer, LoopAnswer | LoopStep):
                return answer
            self._has_ended = answer is None
        raise Interrupted


class LoopReplica(Replica):
    """Replica whose gradients come from the user's loop.

    Args:
        job: described job.
        seed: seed of the run, >= 0.
        n: workers of the run, >= 1.
        exchange: exchange with the loop.
        settings: other arguments of `Replica`.
    """

    def __init__(self, job: Job, seed: int, n: int, *, exchange: Exchange, **settings: Any) -> None:
        super().__init__(job, seed, n, **settings)
        self._exchange = exchange
        self.kept = exchange.kept
        self._known: tuple[UpcomingMinibatch, ...] = ()
        self._local_step = 0  # of the next gradient
        self._answer = LoopAnswer(None, (), ())

    def prefetch(self, known: Iterable[UpcomingMinibatch]) -> None:
        """Set the forecast of the minibatches that follow the next one."""
        self._known = tuple(known)

    def gradient(
        self, worker: int, draw: int, minibatch: Minibatch | None, version: FlatBuffers, gradient: FlatBuffers
    ) -> GradientStats:
        """Wait for the gradient of a minibatch at a version; one whose loss is not known may be finite."""
        stats = super().gradient(worker, draw, minibatch, version, gradient)
        if self._answer.skipped:
            return stats._replace(finite=False, skipped=True)
        return stats if self._answer.loss is not None else stats._replace(finite=isfinite(stats.squared_norm))

    def _load(self, worker: int, draw: int, minibatch: Minibatch | None) -> Batch:
        first = UpcomingMinibatch(worker, draw, minibatch)
        return [self._lease(*each) for each in (first, *self._known)]

    def _lease(self, worker: int, draw: int, minibatch: Minibatch | None) -> Lease:
        assert minibatch is not None
        assert isinstance(self._loader, MinibatchLoader)
        return Lease(minibatch, self._loader.indices(worker, draw, minibatch))

    def _forward_backward(self, batch: Batch, gradient: FlatBuffers, *, notifies: bool) -> PartialGradient:
        lease, *upcoming = batch
        check = self._check or (lambda: None)
        check()
        task = LoopTask(
            lease=lease,
            upcoming=tuple(upcoming),
            model=self.model,
            gradient=gradient,
            progress=self.progress,
            check=check,
            step=self._local_step,
        )
        answer = self._exchange.ask(task)
        assert isinstance(answer, LoopAnswer)
        check()
        self._answer = answer
        self.learning_rates = answer.learning_rates
        self.options = answer.options
        loss = nan if answer.loss is None else answer.loss
        return PartialGradient(
            loss=loss, samples=len(lease.indices), mean_square=0.0, microbatches=0, squared_norms=answer.squared_norms
        )


class LoopHost(HostProcess):
    """Process in which the user's loop has the main thread and the worker another one.

    Args:
        exchange: exchange between both.

    Attributes:
        pause: asks the server to go on without this rank, given the reason.
        resume: asks the server for the next task.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._leave: Callable[[str], None] | None = None
        self.pause: Callable[[str], None] = lambda reason: None
        self.resume: Callable[[], None] = lambda: None

    def set_num_threads(self, count: int) -> None:
        """Leave the number of threads to the user."""

    def on_joined(self, pause: Callable[[str], None], resume: Callable[[], None]) -> None:
        """Keep the functions for the pauses of the loop."""
        self.pause = pause
        self.resume = resume

    def leaving_on_sigterm(self, leave: Callable[[str], None]) -> AbstractContextManager[None]:
        """Keep the function for `leave`; the main thread handles signals."""
        self._leave = leave
        return nullcontext()

    def leave(self, reason: str, outcome: Outcome = Outcome.INTERRUPTED) -> bool:
        """Ask the worker to leave the run after the gradient under way; return False before it takes part.

        Args:
            reason: reason for leaving.
            outcome: outcome of a run that ends when any of its ranks leaves.
        """
        if self._leave is not None and reason != CTRL_C:  # at which rank 0 ends the run of all ranks
            self._leave(reason)
        return self._leave is not None

    def replica(
        self, job: Job, seed: int, n: int, *, local_steps: LocalSteps | None = None, **settings: Any
    ) -> Replica:
        """Return the replica that waits for the user's loop, which makes no local steps."""
        assert local_steps is None
        return LoopReplica(job, seed, n, exchange=self._exchange, **settings)
