"""A run's folder: `run.json` says what was run, `events.jsonl` what happened, a line each, as it happens."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any, TextIO, get_args

from paceline.callbacks import Callback
from paceline.errors import RunError, UsageError
from paceline.history import Record

RUN = "run.json"
EVENTS = "events.jsonl"
MODEL = "model.safetensors"


class RunFolder(Callback):
    """Writes a run down while it goes on.

    Each line of the log is complete before the next one begins, so that a crash costs at most the last line.

    Args:
        path: of the folder, which must not exist yet.
        configuration: what was asked for; versions are added.
        overwrite: whether the files of an earlier run in this folder may be replaced.

    Raises:
        UsageError: the folder exists.
        RunError: while running, when nothing more can be written.
    """

    def __init__(self, path: Path, configuration: Mapping[str, Any], overwrite: bool = False) -> None:
        self.path = path
        self._configuration = {**configuration, "versions": versions()}
        self._log: TextIO | None = None
        if path.exists() and not overwrite:
            raise UsageError(f"{path} exists already; give another folder, or --overwrite (overwrite=True)")

    def on_record(self, record: Record) -> None:
        """Write one line; the first one makes the folder, so that a run that never began leaves none."""
        try:
            if self._log is None:
                self._log = self._begin()
            self._log.write(to_line(record))
        except OSError as error:
            raise self._cannot_write(EVENTS, error) from error

    def _begin(self) -> TextIO:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / MODEL).unlink(missing_ok=True)
        text = json.dumps(self._configuration, indent=2, default=str)
        (self.path / RUN).write_text(text + "\n", encoding="utf-8")
        return (self.path / EVENTS).open("w", buffering=1, encoding="utf-8")

    def save_model(self, tensors: Mapping[str, Any]) -> None:
        """Write the parameters and buffers that were learned, if the run has begun."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if self._log is None:
            return
        try:
            save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, self.path / MODEL)
        except (OSError, SafetensorError) as error:
            raise self._cannot_write(MODEL, error) from error

    def close(self) -> None:
        """End the log."""
        try:
            if self._log is not None:
                self._log.close()
        except OSError as error:
            raise self._cannot_write(EVENTS, error) from error

    def _cannot_write(self, name: str, error: Exception) -> RunError:
        reason = getattr(error, "strerror", None) or error
        return RunError(
            f"cannot write {self.path / name}: {reason}; the run stopped, and what was written before is kept"
        )


def to_line(record: Record) -> str:
    """Return a record as one line of JSON; what is not a number becomes null."""
    event, names = _EVENTS[type(record)]
    content = {"event": event, **{name: plain(getattr(record, name)) for name in names}}
    return json.dumps(content, allow_nan=False) + "\n"


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log; a last one that a crash cut short is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


@cache
def versions() -> dict[str, str]:
    """Return the versions that a run depends on."""
    packages = {name: version(name) for name in ("paceline", "torch", "numpy")}
    return {"python": platform.python_version(), **packages}


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: what is not a number becomes null."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def _event_name(kind: type[Any]) -> str:
    """Return ``gradient_arrived`` for ``GradientArrived``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


_EVENTS: dict[type[Any], tuple[str, list[str]]] = {
    kind: (_event_name(kind), [field.name for field in fields(kind)]) for kind in get_args(Record)
}
