"""What a task is: something to be done once, and to be told from all others by what it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from papers.dbw.store import Line


@dataclass(frozen=True)
class Where:
    """What a task needs to know and its result does not depend on, but for `updates`.

    Args:
        folder: of the data set.
        device: "cpu" or "cuda".
        updates: after which every run ends, to try something out.
    """

    folder: Path
    device: str = "cpu"
    updates: int | None = None


class Task(Protocol):
    """A piece of work that a store keeps one line of."""

    def asked(self) -> Line:
        """Return everything that its result depends on."""

    def carry_out(self, where: Where) -> Line:
        """Do it, and return the line."""
