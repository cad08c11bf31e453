"""The figures of a run as plain values."""

from __future__ import annotations

from typing import Any

from paceline.recording.figures import count
from paceline.train import Result


def summary(result: Result) -> dict[str, Any]:
    """Return the figures of a run, as plain values."""
    figures = count(result.history)
    return {
        **figures.plain(),
        "updates_per_s": figures.updates_per_s,
        "folder": str(result.folder) if result.folder else None,
    }
