"""Thread of the worker beside the user's loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.core.events import Outcome
from paceline.engines.distributed import RunFinished
from paceline.user_loop.worker.exchange import Exchange, LoopEnd, LoopPause
from paceline.user_loop.worker.loop_lifecycle import LoopLifecycle

LEAVE_S = 30.0


class WorkerThread:
    """Thread that takes part in a run, and sends its end, or the error that ended it, to the loop.

    Args:
        take_part: takes part in the run until its end.
        exchange: exchange with the loop.
        lifecycle: begin and end of its part.
    """

    def __init__(self, take_part: Callable[[], LoopEnd], exchange: Exchange, lifecycle: LoopLifecycle) -> None:
        self._take_part = take_part
        self._exchange = exchange
        self._lifecycle = lifecycle
        self._thread = threading.Thread(target=self._serve, name="paceline-worker", daemon=True)
        self._thread.start()

    def leave(self, reason: str) -> bool:
        """Ask the worker to leave the run after the gradient under way; return False before it takes part."""
        return self._lifecycle.leave(reason)

    def pause(self, reason: str) -> None:
        """Give the task back, until `resume`."""
        self._lifecycle.pause(reason)
        self._exchange.to_worker.put(LoopPause())

    def resume(self) -> None:
        """Take part again; the next task follows."""
        self._lifecycle.resume()

    def stop(self, reason: str, outcome: Outcome, *, waits: bool) -> None:
        """Let the worker leave the run now, without a gradient.

        Args:
            reason: reason for leaving.
            outcome: outcome of a run that ends when any of its ranks leaves.
            waits: whether to wait for the end of the thread.
        """
        self._lifecycle.leave(reason, outcome)
        self._exchange.to_worker.put(None)
        if waits:
            self._thread.join(LEAVE_S)

    def _serve(self) -> None:
        result: LoopEnd | BaseException
        try:
            result = self._take_part()
        except RunFinished as finished:
            result = LoopEnd(None, finished.end)
        except BaseException as error:  # raised in the thread of the loop
            result = error
        self._exchange.to_loop.put(result)
