"""Iterations of loops that step several optimizers in turn, so that each iteration makes several updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from paceline.core.events import EndRun, Outcome
from paceline.core.gradient import StepPlace

KEPT = 64  # updates whose steps are kept
AT_THE_END = frozenset({Outcome.EPOCHS, Outcome.GRADIENTS})  # outcomes by the workload, which counts iterations


class Iterations:
    """Iterations of the loops of all workers, of which each update makes one step.

    A worker is in step if the last step of its loop is that of the latest update: then its next one is that of the
    others. A worker that was late waits until it is in step again. One that has just joined is where its loop begins,
    and its gradient is dropped unless the others are there, too. So each optimizer steps as often as in the loop of
    one process.

    A run whose data end does so with an iteration, so that its last steps are made, too.

    Attributes:
        are_several: whether the loops have several optimizers, as far as is known.
        end: end of the run that is due when a loop begins an iteration; None if none is due.
        waiting: workers whose loops wait for a batch, and make no step before.

    Example:
        >>> critic, generator = StepPlace(1, 1, 1), StepPlace(2, 1, 2)
        >>> iterations = Iterations()
        >>> [iterations.admits(worker, critic, live=[0, 1, 2]) for worker in (0, 1)]
        [True, True]
        >>> iterations.begin_update()
        >>> iterations.admits(2, critic, live=[0, 1, 2]), iterations.admits(0, generator, live=[0, 1, 2])
        (False, True)
        >>> [iterations.may_start(worker, live=[0, 1, 2]) for worker in (1, 2)]
        [True, True]
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew: all loops begin an iteration."""
        self.are_several = False
        self.end: EndRun | None = None
        self.waiting: set[int] = set()
        self._made: deque[StepPlace] = deque(maxlen=KEPT)  # steps of the latest updates
        self._of_update: StepPlace | None = None  # step of the update in progress; None while it is not known
        self._last: dict[int, StepPlace] = {}  # last step of each worker's loop that is known
        self._skipped: set[int] = set()  # workers whose loops make the step of the update in progress unseen

    def admits(self, worker: int, step: StepPlace, live: Collection[int]) -> bool:
        """Note the last step of a loop; return whether its gradient is one of the update in progress.

        Args:
            worker: number of the worker.
            step: the step.
            live: workers that take part.
        """
        is_behind = bool(self._made) and step == self._made[-1]  # its loop has not made the step that was skipped
        if self._of_update is None and (step == self._expected() or (self._knows(worker, live) and not is_behind)):
            self._of_update = step
        self.pass_by(worker, step)
        return step == self._of_update

    def pass_by(self, worker: int, step: StepPlace) -> None:
        """Note the last step of a loop whose gradient is too late."""
        self._last[worker] = step
        self._skipped.discard(worker)

    def skip(self, worker: int) -> None:
        """Note that the loop of a worker makes the step of this update, whose gradients are dropped."""
        self._skipped.add(worker)

    def forget(self, worker: int) -> None:
        """Note that it is not known whether the loop of a worker makes another step, or that the worker is gone."""
        self._last.pop(worker, None)
        self._skipped.discard(worker)

    def begin_update(self) -> None:
        """Begin the next update."""
        if self._of_update is None:
            return
        before = self._made[-1] if self._made else None
        self._made.append(self._of_update)
        self._of_update = None
        for worker in self._skipped:
            if self._last.pop(worker, None) == before:  # it was in step
                self._last[worker] = self._made[-1]
        self._skipped.clear()

    def may_start(self, worker: int, live: Collection[int]) -> bool:
        """Return whether the next step of a worker's loop may be that of the update in progress."""
        last = self._last.get(worker)
        if last not in self._made:
            return True
        return last == self._made[-1] or (self._of_update is None and self._knows(worker, live))

    def defers(self, end: EndRun) -> bool:
        """Return whether the end of a run waits for the end of the iteration."""
        if not self.are_several or end.outcome not in AT_THE_END:
            return False
        self.end = end
        return True

    def goes_on(self, worker: int) -> bool:
        """Return whether the loop of a worker may make a step without another batch."""
        return self.are_several and worker not in self.waiting

    def _knows(self, worker: int, live: Collection[int]) -> bool:
        """Return whether the next step of a worker's loop is that of the update in progress, or no other one knows."""
        if not self._made or self._last.get(worker) == self._made[-1]:
            return True
        return not any(self._last.get(each) == self._made[-1] for each in live)

    def _expected(self) -> StepPlace | None:
        """Return the step after the latest time at which the latest one was made before; None if it was not."""
        made = list(self._made)
        return next((after for step, after in zip(made[-2::-1], made[:0:-1], strict=True) if step == made[-1]), None)
