"""Devices and processor cores that workers run on."""

import os

from paceline.errors import UsageError, did_you_mean

DEVICES = ("cpu", "cuda")


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_device(device: str) -> None:
    """Refuse a device that is not known."""
    if device not in DEVICES:
        raise UsageError(f"device={device!r} is not known{did_you_mean(str(device), DEVICES)}")
