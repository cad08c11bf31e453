"""Exchange between the user's loop and the thread of the worker: tasks, answers, steps, pauses and the end."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from paceline.core.bounds import Option
from paceline.core.events import Minibatch
from paceline.core.gradient import StepPlace
from paceline.engines.distributed import End
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.worker.gradient_source import Interrupted, OnReady
from paceline.worker.kept_values import KeptValues
from paceline.worker.task_progress import TaskProgress

CHECK_S = 1.0


class LoopTask(NamedTuple):
    """Task of the user's loop.

    Attributes:
        minibatch: number of the minibatch of the task; None if this rank draws its own data, or none is left.
        upcoming: forecast of the minibatches that follow.
        model: parameters and buffers of the version; buffers are changed in place.
        gradient: flat buffers for the gradient.
        progress: progress of the run.
        check: function that raises `Interrupted` if the task is interrupted.
        step: local steps before this minibatch in the same work, >= 0.
        on_ready: called with each gradient that is complete, so that its sum begins; None for a gradient that is handed
            in as a whole.
    """

    minibatch: Minibatch | None
    upcoming: tuple[Minibatch, ...]
    model: nn.Module
    gradient: FlatBuffers
    progress: TaskProgress = TaskProgress()
    check: Callable[[], None] = lambda: None
    step: int = 0
    on_ready: OnReady | None = None

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
        """Epoch of the minibatch, >= 0; 0 for data of this rank."""
        return 0 if self.minibatch is None or self.minibatch.epoch is None else self.minibatch.epoch


class LoopAnswer(NamedTuple):
    """Gradient of a task, which has been written.

    Attributes:
        loss: mean loss of the samples, None if it is not known.
        samples: samples of the gradient, >= 1.
        learning_rates: learning rate of each parameter group for the step of this gradient.
        options: other options of each parameter group, which the loop or a scheduler may change.
        skipped: whether the loop skipped the step.
        overflowed: whether it did so because the gradient was not finite, as a GradScaler does.
        squared_norms: squared norm of each parameter's gradient that is known, by index.
        weight: what the gradient counts in the mean of an update, > 0; None for its samples.
        minibatches: 0 if the loop has computed it from the batch of an earlier task, else 1.
        step_place: place of its step in a loop with several optimizers; None in another one.
    """

    loss: float | None
    samples: int
    learning_rates: tuple[float, ...]
    options: tuple[dict[str, Option], ...]
    skipped: bool = False
    overflowed: bool = False
    squared_norms: Mapping[int, Tensor] = MappingProxyType({})
    weight: float | None = None
    minibatches: int = 1
    step_place: StepPlace | None = None


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
