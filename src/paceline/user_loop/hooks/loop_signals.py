"""Handlers of Ctrl-C and SIGTERM in the process of a user's loop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from paceline.core.events import CTRL_C
from paceline.user_loop.run_end import INTERRUPTED_STATUS

DEFAULTS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class LoopSignals:
    """Handlers that let a rank leave its run at the first Ctrl-C or SIGTERM; the second signal acts as usual.

    They replace the defaults only, not a handler of the user, and in the main thread only, because Python handles
    signals nowhere else.

    Args:
        leave: asks the worker to leave, given the name of the signal; it is called between any two instructions of the
            main thread, and returns False if there is no run to leave yet.
    """

    def __init__(self, leave: Callable[[str], bool]) -> None:
        self._leave = leave
        is_main = threading.current_thread() is threading.main_thread()
        self._caught = [number for number in DEFAULTS if is_main and signal.getsignal(number) == DEFAULTS[number]]
        for number in self._caught:
            signal.signal(number, self._catch)

    def close(self) -> None:
        """Restore the defaults, unless the user has installed a handler meanwhile."""
        for number in self._caught:
            if signal.getsignal(number) == self._catch:
                signal.signal(number, DEFAULTS[number])

    def _catch(self, number: int, frame: object) -> None:
        self.close()
        if self._leave(CTRL_C if number == signal.SIGINT else signal.Signals(number).name):
            return
        if number == signal.SIGINT:
            raise SystemExit(INTERRUPTED_STATUS)
        os.kill(os.getpid(), number)
