"""A run's folder: what was run, what happened, what was learned."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

from paceline.callbacks.base import Callback
from paceline.errors import RunError, UsageError
from paceline.history import History, Record
from paceline.recording.event_log import EventLog, read_records
from paceline.recording.lock import FolderLock

RUN = "run.json"
EVENTS = "events.jsonl"
ERROR = "error.txt"
MODEL = "model.safetensors"
CHECKPOINTS = "checkpoints"
UNFINISHED = ".unfinished"
REPORT = "report.html"
TIMELINE = "timeline.json"
TENSORBOARD = "tensorboard"


class RunFolder(Callback):
    """Writes a run down while it goes on.

    Args:
        path: of the folder.
        configuration: what was asked for; versions are added.
        overwrite: whether the files of an earlier run in this folder may be replaced.
        keep_bytes: how much of the log of a run that is resumed is kept; None for a new run.

    Raises:
        UsageError: the folder exists, and is neither to be replaced nor resumed.
        RunError: while running, when nothing more can be written.
    """

    def __init__(
        self,
        path: Path,
        configuration: Mapping[str, Any],
        *,
        overwrite: bool = False,
        keep_bytes: int | None = None,
    ) -> None:
        self.path = path
        self._configuration = {**configuration, "versions": versions()}
        self._log: EventLog | None = None
        self._lock = FolderLock(path, "another run") if keep_bytes is not None else None
        self._keep_bytes = keep_bytes
        if path.exists() and keep_bytes is None:
            self._check_free(overwrite)

    def _check_free(self, overwrite: bool) -> None:
        if not overwrite:
            raise UsageError(f"{self.path} exists already; give another folder, or --overwrite (overwrite=True)")
        names = {entry.name for entry in self.path.iterdir()} - {UNFINISHED}
        if names and RUN not in names:
            raise UsageError(f"{self.path} holds something else than a run; give another folder")

    @property
    def history(self) -> History:
        """What is written down."""
        return History(lambda: read_records(self.path / EVENTS))

    def on_record(self, record: Record) -> None:
        """Write one line; the first one makes the folder, so that a run that never began leaves none."""
        try:
            if self._log is None:
                self._log = self._begin()
            self._log.write(record)
        except OSError as error:
            raise self._cannot_write(EVENTS, error) from error

    def settle(self) -> int:
        """Wait until the log is on the disk and return its size in bytes."""
        try:
            return self._log.settle() if self._log is not None else self._keep_bytes or 0
        except OSError as error:
            raise self._cannot_write(EVENTS, error) from error

    def _begin(self) -> EventLog:
        self.path.mkdir(parents=True, exist_ok=True)
        if self._keep_bytes is None:
            self._lock = FolderLock(self.path, "another run")
            self._clear()
        text = json.dumps(self._configuration, indent=2, default=str)
        unfinished = self.path / UNFINISHED
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.rename(self.path / RUN)
        return EventLog(self.path / EVENTS, self._keep_bytes or 0)

    def _clear(self) -> None:
        """Take away what an earlier run has left in this folder and this one might not write."""
        for name in (ERROR, MODEL, REPORT, TIMELINE):
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.path / CHECKPOINTS, self.path / TENSORBOARD):
            if folder.exists():
                shutil.rmtree(folder)

    def save_model(self, tensors: Mapping[str, Any]) -> None:
        """Write the parameters and buffers that were learned, if the run has begun."""
        from safetensors import SafetensorError
        from safetensors.torch import save

        if self._log is None:
            return
        try:
            data = save({name: tensor.contiguous().clone() for name, tensor in tensors.items()})
            (self.path / UNFINISHED).write_bytes(data)
            (self.path / UNFINISHED).rename(self.path / MODEL)
        except (OSError, SafetensorError) as error:
            raise self._cannot_write(MODEL, error) from error

    def close(self) -> None:
        """End the log."""
        try:
            if self._log is not None:
                self._log.close()
        except OSError as error:
            raise self._cannot_write(EVENTS, error) from error
        finally:
            if self._lock is not None:
                self._lock.release()

    def _cannot_write(self, name: str, error: Exception) -> RunError:
        reason = getattr(error, "strerror", None) or error
        return RunError(
            f"cannot write {self.path / name}: {reason}; the run stopped, and what was written before is kept"
        )


class SavedRun:
    """A run as its folder tells of it, whether it has ended or is still going.

    Args:
        path: of the folder.

    Attributes:
        configuration: what was run, as `run.json` has it.
        history: what happened.

    Raises:
        UsageError: there is no run in this folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.configuration: dict[str, Any] = json.loads((self.path / RUN).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(self._what_it_is(error)) from error
        self.history = History(lambda: read_records(self.path / EVENTS))

    @property
    def error(self) -> str | None:
        """First line of the error that ended a run of a comparison or a search; None if it did not crash."""
        try:
            return (self.path / ERROR).read_text(encoding="utf-8").partition("\n")[0]
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return f"the error is unknown: cannot read {self.path / ERROR} ({error})"

    def _what_it_is(self, error: Exception) -> str:
        if not self.path.exists():
            return f"there is no folder {self.path}; expected that of a run, as --out named it"
        if isinstance(error, FileNotFoundError):
            inside = next((str(path.parent) for path in sorted(self.path.rglob(RUN))), "--out named it")
            return f"{self.path} is not the folder of a run; expected one with {RUN} in it, as {inside}"
        return f"cannot read {self.path / RUN}: {error}"


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
