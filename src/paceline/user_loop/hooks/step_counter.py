"""Step counter: the steps of a user's loop, and their places if it steps several optimizers in turn."""

from __future__ import annotations

from paceline.core.gradient import NO_STEP, StepPlace
from paceline.user_loop.data.task_source import TaskSource
from paceline.user_loop.worker.exchange import LoopTask


class StepCounter:
    """Counter of the steps of one loop.

    Args:
        tasks: tasks of the loop.
        are_several: whether it steps several optimizers.

    Attributes:
        steps: steps so far, with those that a GradScaler has skipped, >= 0.
        latest: place of the latest one; `NO_STEP` before the first one.
    """

    def __init__(self, tasks: TaskSource, *, are_several: bool) -> None:
        self.steps = 0
        self.latest = NO_STEP
        self._tasks = tasks
        self._are_several = are_several
        self._iteration: LoopTask | None = None  # task with whose batch the latest iteration has begun

    def count(self, index: int) -> None:
        """Count a step of the optimizer with this index."""
        self.steps += 1
        optimizer, turn, position = self.latest
        is_new, self._iteration = self._iteration is not self._tasks.taken, self._tasks.taken
        self.latest = StepPlace(index + 1, turn + 1 if index + 1 == optimizer else 1, 1 if is_new else position + 1)

    def is_left_out(self, *, is_iterating: bool) -> bool:
        """Return whether the latest step is left out: its task is of another step, or the run has ended meanwhile.

        Args:
            is_iterating: whether the loop is within an iteration.
        """
        if not self._are_several:
            return False
        task = self._tasks.task
        if task is None:
            return self._tasks.over and is_iterating
        return task.progress.step_place not in (None, self.latest)

    def place(self, task: LoopTask) -> dict[str, int | StepPlace]:
        """Return what the answer to a task says of the latest step; nothing in a loop with one optimizer."""
        if not self._are_several:
            return {}
        return {"step_place": self.latest, "minibatches": int(self._tasks.taken is task)}
