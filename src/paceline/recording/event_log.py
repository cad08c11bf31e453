"""Event log `events.jsonl`: one line of JSON per record, written in the background."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from math import inf, nan
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, get_args

import orjson

from paceline.core.bounds import LONGEST_TEXT
from paceline.core.events import Outcome
from paceline.core.records import Record, RunEnded, VersionEvaluated
from paceline.errors import PacelineWarning, RunError, describe_error
from paceline.recording.callback import KEPT
from paceline.recording.validation import RecordOrder, check_types
from paceline.utils.files import (
    MOST_LINE_BYTES,
    ContentError,
    create_file,
    in_unicode,
    lines_of,
    open_regular,
    open_to_extend,
    writing,
)
from paceline.utils.wording import in_one_line, printable

WAITING_RECORDS = 10_000  # upper bound; then the run waits for the disk
BATCH_RECORDS = 500
CHUNK_BYTES = 1 << 20
POLL_S = 1.0
SHORTENED_BYTES = MOST_LINE_BYTES // 2


class Prefix(NamedTuple):
    """First bytes of a log, with their running digest.

    Attributes:
        size_bytes: number of bytes.
        digest: SHA-256 of these bytes, which can be copied and updated.
    """

    size_bytes: int
    digest: hashlib._Hash

    @classmethod
    def of(cls, path: Path, size_bytes: int) -> Prefix:
        """Read the first bytes of a log.

        Raises:
            OSError: the log cannot be read.
            ContentError: the log is shorter, or no regular file.
        """
        digest, left_bytes = hashlib.sha256(), size_bytes
        with open_regular(path) as file:
            while left_bytes and (chunk := file.read(min(CHUNK_BYTES, left_bytes))):
                digest.update(chunk)
                left_bytes -= len(chunk)
        if left_bytes:
            raise ContentError(f"it has {size_bytes - left_bytes} bytes, the checkpoint was made at {size_bytes}")
        return cls(size_bytes, digest)


class EventLog:
    """Log writer with a thread and a bounded queue, so that the run does not wait for the disk.

    Lines are written whole and in order. A crash loses the last few lines and cuts at most one short.

    A signal handler may raise in any method. So each step that the writer must not miss is one call of a `SimpleQueue`,
    which is written in C and either happens or does not. An exception could leave a lock of `Queue` held, and make
    `Thread.join` take a thread for ended.

    Args:
        path: path of the file.
        keep: first bytes of an existing file that are kept; None for a new file.

    Raises:
        OSError: the file cannot be opened.
        RunError: from any method: the file cannot be written, or a record has a field that is not plain data.
    """

    def __init__(self, path: Path, keep: Prefix | None = None) -> None:
        self._path = path
        self._file = open_to_extend(path) if keep else create_file(path)
        self._digest = keep.digest.copy() if keep else hashlib.sha256()
        self._file.truncate(keep.size_bytes if keep else 0)
        self._file.seek(0, os.SEEK_END)
        self._waiting: SimpleQueue[Record | SimpleQueue[None] | None] = SimpleQueue()
        self._error: RunError | None = None
        self._has_ended = False  # the writer
        self._writer = Thread(target=self._write, name="paceline event log", daemon=True)
        self._writer.start()

    def write(self, record: Record) -> None:
        """Queue a record."""
        self._raise()
        if self._waiting.qsize() >= WAITING_RECORDS:
            self._await_written()
        self._waiting.put(record)

    def settle(self) -> Prefix:
        """Wait until all records are on the disk; return length and digest of the whole log."""
        self._await_written()
        self._raise()
        with writing(self._path, KEPT):
            os.fsync(self._file.fileno())
        return Prefix(self._file.tell(), self._digest.copy())

    @property
    def is_gone(self) -> bool:
        """Whether the file was deleted, moved, replaced or unmounted."""
        try:
            return not os.path.samestat(os.lstat(self._path), os.fstat(self._file.fileno()))
        except OSError:
            return True

    def copy_to(self, path: Path) -> Prefix:
        """Copy the log to a new file, also if its own file was deleted; return length and digest of the copy.

        Raises:
            OSError: the log cannot be read, or the new file cannot be written.
        """
        self._await_written()
        digest, size_bytes = hashlib.sha256(), 0
        with create_file(path) as file:
            while chunk := os.pread(self._file.fileno(), CHUNK_BYTES, size_bytes):
                size_bytes += file.write(chunk)
                digest.update(chunk)
            file.flush()
            os.fsync(file.fileno())
        return Prefix(size_bytes, digest)

    def close(self) -> None:
        """Write the queued records and close the file."""
        self._await_written()
        self._waiting.put(None)
        self._writer.join(POLL_S)
        try:
            with writing(self._path, KEPT):
                self._file.close()
        finally:
            self._raise()

    def _await_written(self) -> None:
        """Wait until all records that are queued now are written."""
        written: SimpleQueue[None] = SimpleQueue()
        self._waiting.put(written)
        while not self._has_ended:
            with suppress(Empty):
                written.get(timeout=POLL_S)
                return

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        is_open = True
        while is_open:
            taken = self._take()
            self._write_out([each for each in taken if each is not None and not isinstance(each, SimpleQueue)])
            for each in taken:
                if isinstance(each, SimpleQueue):
                    each.put(None)
            is_open = None not in taken
        self._has_ended = True

    def _take(self) -> list[Record | SimpleQueue[None] | None]:
        """Wait for a record and return it with other queued ones; None closes the log, a queue waits for an answer."""
        taken = [self._waiting.get()]
        with suppress(Empty):
            while len(taken) < BATCH_RECORDS:
                taken.append(self._waiting.get_nowait())
        return taken

    def _write_out(self, records: list[Record]) -> None:
        if self._error is not None:
            return  # write and close raise it
        try:
            lines = b"".join(map(to_line, records))
            with writing(self._path, KEPT):
                self._file.write(lines)
                self._file.flush()
            self._digest.update(lines)
        except RunError as error:
            self._error = error
        except TypeError as error:
            self._error = RunError(f"a record of the run cannot be written as JSON: {error}")
        except Exception as error:  # the thread lives on: its end is awaited
            self._error = RunError(f"cannot write {self._path}: {describe_error(error)}")


def to_line(record: Record) -> bytes:
    r"""Return a record as one line of JSON; a number that is not finite becomes null.

    >>> to_line(RunEnded(now_s=1.5, outcome=Outcome.UPDATES, reason="3 updates made", busy_s=nan, live_s=3.0))
    b'{"event":"run_ended","now_s":1.5,"outcome":"updates","reason":"3 updates made","busy_s":null,"live_s":3.0}\n'
    >>> end = RunEnded(now_s=1.5, outcome=Outcome.FAILED, reason="caf\udce9", busy_s=0.0, live_s=3.0)
    >>> to_line(end).count("caf\ufffd".encode())
    1
    """
    try:
        content = orjson.dumps(record, option=_OPTIONS)
    except TypeError:  # a text names a file whose name is not UTF-8
        content = orjson.dumps(_with_texts(record, in_unicode), option=_OPTIONS)
    if len(content) > SHORTENED_BYTES:  # no reader takes a line that is too long
        content = orjson.dumps(_with_texts(record, lambda text: in_one_line(text, LONGEST_TEXT)), option=_OPTIONS)
    return _BEGINNINGS[type(record)] + content[1:]


def _with_texts(record: Record, change: Callable[[str], str]) -> Record:
    """Return a record whose texts are changed by a function."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    texts: dict[str, Any] = {name: change(value) for name, value in values.items() if isinstance(value, str)}
    return replace(record, **texts)


def to_record(line: bytes) -> Record:
    """Return the record in a line of the log; null becomes nan."""
    content = orjson.loads(line)
    if _CONTROL.search(line):
        content = {name: printable(each) if isinstance(each, str) else each for name, each in content.items()}
    kind = _KINDS[content.pop("event")]
    if None in content.values():
        content = {name: nan if value is None and name in _NUMBERS[kind] else value for name, value in content.items()}
    if kind is VersionEvaluated:
        content["metrics"] = {name: nan if value is None else value for name, value in content["metrics"].items()}
    elif kind is RunEnded:
        content["outcome"] = Outcome(content["outcome"])
    record: Record = kind(**content)
    check_types(record)
    return record


def read_records(path: Path, until_bytes: float = inf) -> Iterator[Record]:
    """Yield the records of a log, also of a run that is still going.

    A last line that is cut short, and a line that is too long, are left out with a warning.

    Args:
        path: path of the log.
        until_bytes: number of bytes to read; inf for all.

    Raises:
        RunError: the log cannot be read.
    """
    order = RecordOrder()
    number = read_bytes = 0

    def leave_out(size_bytes: int) -> None:
        nonlocal number, read_bytes
        number += 1
        read_bytes += size_bytes
        warn_of_long_line(path, number)

    for line in _lines(path, leave_out):
        number += 1
        read_bytes += len(line)
        if read_bytes > until_bytes:
            return
        if not line.endswith(b"\n"):
            warnings.warn(f"{path}, line {number} is cut short: it is left out", PacelineWarning, stacklevel=2)
            return
        yield parsed(line, order, f"{path}, line {number}")


def parsed(line: bytes, order: RecordOrder, place: str) -> Record:
    """Return the record in the next line of a log, with its types and its order checked.

    Args:
        line: the line, with its line end.
        order: checker that has seen the earlier records.
        place: log and number of the line, for the error.

    Raises:
        RunError: the line has no record, or one that cannot come next.
    """
    try:
        record = to_record(line)
        order.check(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{place} is no record of a run ({error}): {line[:80]!r}") from error
    return record


def is_cut_short(path: Path) -> bool:
    """Return whether the last line of a log is cut short."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read(1) not in {b"", b"\n"}


def warn_of_long_line(path: Path, number: int) -> None:
    """Warn that a line of a log is left out."""
    text = f"{path}, line {number} has more than {MOST_LINE_BYTES} bytes: it is left out"
    warnings.warn(text, PacelineWarning, stacklevel=3)


def _lines(path: Path, leave_out: Callable[[int], None]) -> Iterable[bytes]:
    number = 0
    try:
        with open_regular(path) as file:
            for line in lines_of(file, leave_out):
                number += 1
                yield line
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}; expected the log of a run") from error
    except ContentError as error:
        raise RunError(f"cannot read {path} after line {number}: {error}; expected the log of a run") from error


def _event_name(kind: type[Any]) -> str:
    """Return ``gradient_arrived`` for ``GradientArrived``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


_CONTROL = re.compile(rb"\\u|[\x7f]|\xc2[\x80-\x9f]|\xe2(?:\x80|\x81)")  # may be in a line with control characters
_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
_KINDS: dict[str, type[Any]] = {_event_name(kind): kind for kind in get_args(Record)}
_BEGINNINGS = {kind: f'{{"event":"{name}",'.encode() for name, kind in _KINDS.items()}
_NUMBERS = {kind: {field.name for field in fields(kind) if field.type == "float"} for kind in get_args(Record)}
