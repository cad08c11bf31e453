"""Handler of SIGTERM in the process of a user's loop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


class SigtermHandler:
    """Handler that lets a rank leave its run at the first SIGTERM; the second one ends the process.

    It replaces the default only, not a handler of the user, and in the main thread only, because Python handles
    signals nowhere else.

    Args:
        leave: asks the worker to leave, given the reason; it is called between any two instructions of the main
            thread, and returns False if there is no run to leave yet.
    """

    def __init__(self, leave: Callable[[str], bool]) -> None:
        self._leave = leave
        is_main = threading.current_thread() is threading.main_thread()
        self._is_installed = is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self._is_installed:
            signal.signal(signal.SIGTERM, self._catch)

    def close(self) -> None:
        """Restore the default, unless the user has installed a handler meanwhile."""
        if self._is_installed and signal.getsignal(signal.SIGTERM) == self._catch:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _catch(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self._leave("SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
