"""Thread of the worker beside the user's loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.core.events import Outcome
from paceline.engines.distributed import RunFinished
from paceline.user_loop.loop_replica import Exchange, LoopEnd, LoopHost, LoopPause

LEAVE_S = 30.0


class WorkerThread:
    """Thread that takes part in a run, and sends its end, or the error that ended it, to the loop.

    Args:
        take_part: takes part in the run until its end.
        exchange: exchange with the loop.
        host: process of the rank.
    """

    def __init__(self, take_part: Callable[[], LoopEnd], exchange: Exchange, host: LoopHost) -> None:
        self._take_part = take_part
        self._exchange = exchange
        self._host = host
        self._thread = threading.Thread(target=self._serve, name="paceline-worker", daemon=True)
        self._thread.start()

    def leave(self, reason: str) -> bool:
        """Ask the worker to leave the run after the gradient under way; return False before it takes part."""
        return self._host.leave(reason)

    def pause(self, reason: str) -> None:
        """Give the task back, until `resume`."""
        self._host.pause(reason)
        self._exchange.to_worker.put(LoopPause())

    def resume(self) -> None:
        """Take part again; the next task follows."""
        self._host.resume()

    def stop(self, reason: str, outcome: Outcome, *, waits: bool) -> None:
        """Let the worker leave the run now, without a gradient.

        Args:
            reason: reason for leaving.
            outcome: outcome of a run that ends when any of its ranks leaves.
            waits: whether to wait for the end of the thread.
        """
        self._host.leave(reason, outcome)
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
