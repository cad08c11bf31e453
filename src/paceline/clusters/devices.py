"""Devices and processor cores of workers."""

import os

from paceline.errors import UsageError, did_you_mean

DEVICES = ("cpu", "cuda")


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_device(device: str) -> None:
    """Raise a UsageError unless a device is "cpu" or "cuda"."""
    if device not in DEVICES:
        raise UsageError(f"device={device!r} is not known{did_you_mean(str(device), DEVICES)}")
