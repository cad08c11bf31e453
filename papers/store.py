"""Results as text: one JSON line per run, so that an interrupted grid can resume."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import torch

Line = dict[str, Any]


class Store:
    """Store of the runs of one figure.

    Args:
        path: file of the lines, created with the first one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[Line]:
        """Return all runs, in the order in which they ended."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def done(self) -> set[str]:
        """Return the keys of the finished runs."""
        return {key(line["asked"]) for line in self.lines()}

    def add(self, line: Line) -> None:
        """Append a run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def figure_store(figure: str, folder: Path) -> Store:
    """Return the store of a figure that has a file of its own."""
    return Store(folder / f"{figure}.jsonl")


def key(asked: Line) -> str:
    """Return the key of a run, unique within its figure."""
    return json.dumps(asked, sort_keys=True)


def machine() -> str:
    """Return a description of this machine and the versions of packages, as JSON."""
    packages = {name: version(name) for name in ("paceline", "torch", "numpy")}
    cpu = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    about = {
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **packages,
    }
    return json.dumps(about, indent=2) + "\n"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def rounded(values: Iterable[float]) -> list[float | None]:
    """Return the values with five significant digits; None for values that are not finite."""
    return [float(f"{value:.5g}") if isfinite(value) else None for value in values]
