"""Learning-rate schedulers of attached loops, which follow the workload of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import UsageError
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class SchedulerBinding:
    """Binding of a scheduler: its `step` goes to where the run is.

    A loop that steps its scheduler in each iteration over `run.loader` makes, after W gradients of n workers, W / n
    steps in all, on every rank. A loop that steps it between two such iterations steps it as often as it calls it,
    because the epochs of all ranks are the same.

    Args:
        scheduler: scheduler of the user; its class is replaced by a subclass of the same name, which is left out of a
            pickled scheduler.
        position: returns the number of steps of a rank so far, None while the loop is between two epochs.
    """

    def __init__(self, scheduler: LRScheduler, position: Callable[[], int | None]) -> None:
        self._scheduler = scheduler
        self._kind = kind = type(scheduler)
        self._position = position
        self._made = int(getattr(scheduler, "last_epoch", 0))
        self._offset = 0

        def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
            self._step(*args, **kwargs)

        def reduce(scheduler: LRScheduler, protocol: SupportsIndex) -> Any:
            reduced: Any = kind.__reduce_ex__(scheduler, 1)  # pickle refuses another class under later protocols
            function, arguments, *state = reduced
            return function, tuple(kind if each is bound else each for each in arguments), *state

        methods = {"step": step, "__reduce_ex__": reduce, "__module__": kind.__module__}
        self._bound = bound = type(kind.__name__, (kind,), methods)
        scheduler.__class__ = bound

    def close(self) -> None:
        """Restore the class of the scheduler."""
        if type(self._scheduler) is self._bound:
            self._scheduler.__class__ = self._kind

    def begin(self, position: int) -> None:
        """Record the position of the run at its first task on this rank; a scheduler that is ahead stays ahead."""
        self._offset = max(0, self._made - position)

    def _step(self, *args: Any, **kwargs: Any) -> None:
        position = self._position()
        if position is None:
            self._kind.step(self._scheduler, *args, **kwargs)
            return
        if args or kwargs:
            raise UsageError(
                "scheduler.step() was called with a position in a loop over run.loader, where the position is that of "
                "the run: call scheduler.step() alone"
            )
        while self._made < self._offset + position:
            self._made += 1
            self._kind.step(self._scheduler)


class LoopSchedules:
    """Schedules of the learning rates of a loop's optimizers.

    Args:
        optimizers: optimizers of the user.
        position: returns the number of steps of a rank so far, as in `SchedulerBinding`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], position: Callable[[], int | None]) -> None:
        self._optimizers = optimizers
        self._position = position
        self._bindings: list[SchedulerBinding] = []

    def add(self, scheduler: LRScheduler) -> None:
        """Bind a scheduler.

        Raises:
            UsageError: it follows a metric.
        """
        check_scheduler(scheduler)
        self._bindings.append(SchedulerBinding(scheduler, self._position))

    def begin(self, position: int) -> bool:
        """Begin to schedule; return whether the learning rates are behind those of the run.

        Args:
            position: steps that a rank has made at the first task of this one, >= 0.
        """
        scheduled = [each for each in self._optimizers if hasattr(each.step, "_wrapped_by_lr_sched")]
        for binding in self._bindings:
            binding.begin(position)
        if scheduled and not self._bindings:
            LOG.warning(
                "the optimizer has a learning-rate scheduler that attach was not given: each rank steps its own as "
                "often as it makes steps, so ranks of unequal speed disagree; give scheduler= to attach"
            )
        if not position:
            return False
        for optimizer in scheduled:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns of the scheduler's first step
        return bool(scheduled)

    def close(self) -> None:
        """Restore the classes of the schedulers."""
        for binding in self._bindings:
            binding.close()


def check_scheduler(scheduler: LRScheduler) -> None:
    """Check that a scheduler can follow the workload of a run.

    Raises:
        UsageError: it follows a metric.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau follows a metric, which differs from rank to rank: give a scheduler that follows the "
            "number of steps, as CosineAnnealingLR"
        )
