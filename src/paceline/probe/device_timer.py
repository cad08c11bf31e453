"""Durations of the parts of a DDP step on a device, from the timers of DDP itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.ddp_recording.layout import DEVICE_EVERY
from paceline.probe.step_timer import Row


class DeviceTimer:
    """Timer of the steps of a model on a device, which the host does not wait for.

    DDP measures every tenth step on the device itself and keeps the durations until the next forward pass. The part
    outside forward and backward is what is left of the mean step since the last measurement, on the clock of the host.

    Args:
        emit: function that takes the row of each measured step.

    >>> rows = []
    >>> timer = DeviceTimer(rows.append)
    >>> logged = {"forward_compute_time": 30, "backward_compute_time": 50, "backward_comm_time": 25}
    >>> timer.forward_began(1000, {"iteration": 10, "backward_compute_comm_overlap_time": 5, **logged})
    >>> timer.forward_began(2500, {"iteration": 20, "backward_compute_comm_overlap_time": 5, **logged})
    >>> rows
    [(19, 2350, 50, 30, 50, 0, 20)]
    """

    def __init__(self, emit: Callable[[Row], object]) -> None:
        self._emit = emit
        self._iteration = 0
        self._measured_ns = 0

    def forward_began(self, now_ns: int, logged: Mapping[str, Any]) -> None:
        """Read the durations of the step before a forward pass, if DDP has measured it.

        Args:
            now_ns: time on a monotonic clock, in nanoseconds.
            logged: logging data of DDP; its durations are nanoseconds.
        """
        iteration = int(logged.get("iteration", 0))
        if iteration == self._iteration or iteration % DEVICE_EVERY:
            return
        passed, self._iteration = iteration - self._iteration, iteration
        begun_ns, self._measured_ns = self._measured_ns, now_ns
        if not begun_ns:
            return
        step_ns = (now_ns - begun_ns) // passed
        forward_ns, backward_ns = int(logged["forward_compute_time"]), int(logged["backward_compute_time"])
        sync_ns = int(logged["backward_comm_time"]) - int(logged["backward_compute_comm_overlap_time"])
        data_ns = max(0, step_ns - forward_ns - backward_ns - sync_ns)
        self._emit((iteration - 1, now_ns - step_ns, data_ns, forward_ns, backward_ns, 0, sync_ns))
