"""Folder of a run: its configuration, its event log, its checkpoints and its model."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from itertools import count, islice
from math import isfinite
from pathlib import Path
from typing import Any

from paceline.coordinator.rules import Rules
from paceline.core.records import Record
from paceline.errors import PacelineWarning, RunError, UsageError
from paceline.recording.callback import KEPT, Callback
from paceline.recording.event_log import EventLog, Prefix, read_records
from paceline.recording.history import History
from paceline.recording.lock import FolderLock
from paceline.recording.validation import configuration
from paceline.recording.whole_texts import ERRORS
from paceline.utils import files
from paceline.utils.wording import first_line

RUN = "run.json"
EVENTS = "events.jsonl"
ERROR = "error.txt"
MODEL = "model.safetensors"
CHECKPOINTS = "checkpoints"
WORKERS = "workers"  # states that only one worker has; each worker removes its own
SHARDS = "shards"
REPORT = "report.html"
TIMELINE = "timeline.json"
TENSORBOARD = "tensorboard"
MOST_ENTRIES = 20_000  # largest number of files to search below a folder
MOST_ERROR_BYTES = 1 << 24  # largest traceback that is read


def standby_folder(folder: Path) -> Path:
    """Return the folder of the standby of a run, on the standby's host."""
    return folder.parent / f"{folder.name}-standby"


class FolderGoneError(RunError):
    """The folder of a run disappeared during the run; `kept` is the new folder with its state."""

    def __init__(self, message: str, kept: Path) -> None:
        super().__init__(message)
        self.kept = kept


class RunFolder(Callback):
    """Writer of the folder of a run.

    Args:
        path: folder of the run.
        configuration: configuration of the run, to which the versions of the packages are added.
        overwrite: whether to replace an earlier run in this folder.
        keep: part of the log that a resumed run keeps; None for a new run.

    Raises:
        UsageError: the folder exists, and may be neither replaced nor resumed.
        RunError: a file cannot be written during the run.
    """

    def __init__(
        self,
        path: Path,
        configuration: Mapping[str, Any],
        *,
        overwrite: bool = False,
        keep: Prefix | None = None,
    ) -> None:
        self.path = path
        self._configuration = {**configuration, "versions": versions()}
        self._log: EventLog | None = None
        self._rescued: Path | None = None  # the folder that disappeared
        self._lock = FolderLock(path, "another run") if keep is not None else None
        self._keep = keep
        if os.path.lexists(path) and keep is None:
            check_free(path, overwrite=overwrite)

    @property
    def history(self) -> History:
        """Records of the log."""
        return History(lambda: read_records(self.path / EVENTS))

    def on_record(self, record: Record) -> None:
        """Append a record to the log; the first record creates the folder, so a run that never started leaves none."""
        if self._log is None:
            with files.writing(self.path / EVENTS, KEPT):
                self._log = self._begin()
        self._log.write(record)

    def settle(self) -> Prefix:
        """Flush the log to the disk and return its length and digest."""
        return self._log.settle() if self._log is not None else self._keep or Prefix(0, sha256())

    def _begin(self) -> EventLog:
        self.path.mkdir(parents=True, exist_ok=True)
        if self._keep is None:
            self._lock = FolderLock(self.path, "another run")
            self._clear()
        (self.path / ERROR).unlink(missing_ok=True)  # left by an earlier run, or by this one before it was resumed
        self._write_configuration(self.path)
        return EventLog(self.path / EVENTS, self._keep)

    def _write_configuration(self, path: Path) -> None:
        text = json.dumps(self._configuration, indent=2, default=str)
        files.replace_file(path / RUN, f"{text}\n".encode())

    def _clear(self) -> None:
        """Remove the files of an earlier run that this run may not replace."""
        for name in (MODEL, REPORT, TIMELINE):
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.path / each for each in (CHECKPOINTS, SHARDS, TENSORBOARD, ERRORS)):
            files.refuse_link(folder)
            if folder.exists():
                shutil.rmtree(folder)

    def save_model(self, tensors: Mapping[str, Any]) -> None:
        """Write the parameters and buffers of the model, if the run has started."""
        from safetensors import SafetensorError

        from paceline.tensors import tensor_file

        if self._log is None:
            return
        if self.is_gone:
            path = self.rescue()
            warnings.warn(f"{self._gone()}; the model is in {path}", PacelineWarning, stacklevel=2)
        with files.writing(self.path / MODEL, KEPT, (OSError, SafetensorError)):
            # safetensors takes no tensors that share memory, as views of flat vectors do.
            own = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
            files.replace_file(self.path / MODEL, tensor_file.to_bytes(own))

    @property
    def is_gone(self) -> bool:
        """Whether the folder, or the log in it, was deleted or moved."""
        return self._rescued is None and self._log is not None and self._log.is_gone

    def rescue(self, save: Callable[[Path, Prefix], object] = lambda path, log: None) -> Path:
        """Copy the run to a new folder: beside the old one, else in the working directory, else among temporary files.

        Args:
            save: function that writes a checkpoint to a folder, for a log of that length and digest.

        Raises:
            RunError: no new folder can be written.
        """
        assert self._log is not None
        reason: Exception | None = None
        for path in _free_places(self.path):
            try:
                path.mkdir()
                self._write_configuration(path)
                save(path, self._log.copy_to(path / EVENTS))
            except (OSError, RunError) as error:
                reason = error
                continue
            self._rescued, self.path = self.path, path
            return path
        raise RunError(f"{self._gone()}; the run stopped, and its state cannot be saved elsewhere: {reason}")

    def gone_error(self, version: int) -> FolderGoneError:
        """Return the error that names the new folder of the run."""
        return FolderGoneError(
            f"{self._gone()}; the run stopped at update {version} and is now in {self.path}; "
            f"to resume it, give resume={str(self.path)!r}",
            self.path,
        )

    def _gone(self) -> str:
        return f"the folder {self._rescued or self.path} was deleted, moved or unmounted during the run"

    def close(self) -> None:
        """Close the log and release the folder."""
        try:
            if self._log is not None:
                self._log.close()
        finally:
            if self._lock is not None:
                self._lock.release()


def check_free(path: Path, *, overwrite: bool) -> None:
    """Check that a new run may use a folder that exists.

    Raises:
        UsageError: it may not.
    """
    if not overwrite:
        raise UsageError(f"{path} exists already; give another folder, or overwrite=True")
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder; give another name")
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(files.UNFINISHED)}
    if names - {WORKERS} and RUN not in names:
        raise UsageError(f"{path} contains other files than a run; give another folder")


def _free_places(gone: Path) -> Iterator[Path]:
    """Yield an unused name in each parent folder that still exists."""
    places = []
    with suppress(OSError):  # the working directory may be gone too
        places += [gone.absolute().parent, Path.cwd()]
    for place in dict.fromkeys([*places, Path(tempfile.gettempdir())]):
        names = (place / f"{gone.name or 'run'}-rescued-{number}" for number in count(1))
        yield next(path for path in names if not os.path.lexists(path))


class SavedRun:
    """Reader of the folder of a run, finished or still running.

    Args:
        path: folder of the run.

    Attributes:
        configuration: content of ``run.json``.
        history: records of the log.

    Raises:
        UsageError: the folder has no run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.configuration = configuration(files.read_json(self.path / RUN), str(self.path / RUN))
        except (OSError, files.ContentError) as error:
            raise UsageError(self._describe_problem(error)) from error
        self.history = History(lambda: read_records(self.path / EVENTS))

    @property
    def rules(self) -> Rules:
        """Settings of the coordinator.

        Raises:
            UsageError: the run had none, or an entry is missing.
        """
        return Rules.of(self.configuration["rules"])

    @property
    def error(self) -> str | None:
        """First line of the error that ended a run of a comparison or a search; None without a crash."""
        try:
            return first_line(files.read_bytes(self.path / ERROR, MOST_ERROR_BYTES).decode())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return f"the error is unknown: cannot read {self.path / ERROR} ({error})"

    def records_until(self, places_bytes: Sequence[int]) -> list[int]:
        """Return the number of records in the log before each of these byte offsets."""
        if not places_bytes:
            return []
        ends_bytes: list[int] = []
        left_out: list[int] = []
        try:
            with files.open_regular(self.path / EVENTS) as file:
                for line in files.lines_of(file, left_out.append):
                    ends_bytes.append((ends_bytes or [0])[-1] + sum(left_out) + len(line))
                    left_out.clear()
        except (OSError, files.ContentError) as error:
            raise RunError(f"cannot read {self.path / EVENTS}: {getattr(error, 'strerror', None) or error}") from error
        return [bisect_right(ends_bytes, place) for place in places_bytes]

    def _describe_problem(self, error: Exception) -> str:
        if not os.path.exists(self.path):
            return f"there is no folder {self.path}; expected the folder of a run, as given with out="
        if isinstance(error, NotADirectoryError):
            return f"{self.path} is a file; expected the folder of a run, as given with out="
        if isinstance(error, FileNotFoundError):
            below: list[str] = []
            with suppress(UsageError):
                below = [str(path) for path in run_folders(self.path)]
            inside = next(iter(below), "given with out=")
            return f"{self.path} is not the folder of a run; expected one with {RUN} in it, as {inside}"
        return f"cannot read {self.path / RUN}: {error}"


def run_folders(above: Path) -> list[Path]:
    """Return the folders of runs below a folder, in order; links to folders are not followed.

    Raises:
        UsageError: there are too many files to search.
    """
    found, waiting, left = [], [above], MOST_ENTRIES
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(islice(os.scandir(folder), left + 1))
        except OSError:
            continue  # unreadable, or deleted meanwhile
        left -= len(entries)
        if left < 0:
            raise UsageError(f"{above} has more than {MOST_ENTRIES} files below it; name the folder of a run")
        if any(entry.name == RUN for entry in entries):
            found.append(folder)
        waiting += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(found)


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    packages = {name: version(name) for name in ("paceline", "torch", "numpy")}
    return {"python": platform.python_version(), **packages}


def plain(value: Any) -> Any:
    """Return a value for JSON: NaN and infinity become null."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value
