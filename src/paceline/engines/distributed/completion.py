"""When sums were there, while the process that waits for them does something else."""

from __future__ import annotations

import threading
import time
from typing import Any

from paceline.engines.distributed.collective import Begun


class Completion:
    """Notes when the last of some sums was there.

    gloo says so in a thread of its own. NCCL says only that its work is in the queue of the GPU, so of its sums nothing
    is known but when the process had waited for them.

    Args:
        begun: what `Ring.begin_sum` has returned; of nothing the sum is there at once.
    """

    def __init__(self, begun: list[Begun]) -> None:
        self._lock = threading.Lock()
        self._left = len(begun)
        self._last_s = time.monotonic()
        for each in begun:
            if not each.on_gpu:
                each.work.get_future().add_done_callback(self._note)

    def at_s(self, waited_s: float) -> float:
        """Return the moment on the monotonic clock; where it is not known, the one when they had been waited for."""
        with self._lock:
            return waited_s if self._left else min(waited_s, self._last_s)

    def _note(self, future: Any) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._left -= 1
            self._last_s = now_s
