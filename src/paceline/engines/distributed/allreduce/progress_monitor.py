"""Progress monitor: rank 0 asks the members of a group how far they are, while it waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from math import inf

from paceline.engines.distributed.transport.sum_messages import Progress, ProgressRequest

ANSWER_S = 5.0  # for a process that is not suspended


class ProgressMonitor:
    """Requests for the progress of all members, and their answers.

    Args:
        send_all: sends a message to all members, and returns their workers.
    """

    def __init__(self, send_all: Callable[[ProgressRequest], set[int]]) -> None:
        self._send_all = send_all
        self._answers: dict[int, Progress] = {}
        self._changed = threading.Condition()

    def on_progress(self, worker: int, progress: Progress) -> None:
        """Record the answer of a worker. Thread-safe."""
        with self._changed:
            self._answers[worker] = progress
            self._changed.notify_all()

    def idle(self, generation: int, steps: int) -> list[int]:
        """Return the workers that have begun fewer steps than rank 0 in this group and do not wait for a sum."""
        with self._changed:
            self._answers.clear()
        # Without the lock: `on_progress` takes it while its caller holds the lock of the members.
        members = self._send_all(ProgressRequest(generation))
        with self._changed:
            self._changed.wait_for(lambda: self._answers.keys() >= members, ANSWER_S)
            return [worker for worker in sorted(members) if not self._has_progressed(worker, generation, steps)]

    def _has_progressed(self, worker: int, generation: int, steps: int) -> bool:
        answer = self._answers.get(worker)
        return answer is not None and answer.generation == generation and (answer.is_summing or answer.steps >= steps)


def waits_s(actions: dict[Callable[[], None], float]) -> Iterator[float]:
    """Yield how long to wait, in seconds; in between, carry out actions whenever their intervals have passed.

    Args:
        actions: interval of each action in seconds.

    >>> next(waits_s({print: 0.25})) <= 0.25
    True
    """
    due_s = {action: time.monotonic() + interval_s for action, interval_s in actions.items()}
    while True:
        for action, interval_s in actions.items():
            if time.monotonic() >= due_s[action]:
                action()
                due_s[action] = time.monotonic() + interval_s
        yield max(0.0, min(due_s.values(), default=inf) - time.monotonic())
