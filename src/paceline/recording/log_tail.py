"""Incremental reader of the event log of a run that may still be going."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

from paceline.core.records import Record
from paceline.errors import RunError
from paceline.recording.event_log import parsed, warn_of_long_line
from paceline.recording.validation import RecordOrder
from paceline.utils.files import MOST_LINE_BYTES, ContentError, open_regular

CHUNK_BYTES = MOST_LINE_BYTES + 1  # one chunk has at least one whole line


class Increment(NamedTuple):
    """Records that were appended to a log.

    Attributes:
        records: the records in order.
        starts_over: whether earlier records no longer hold: the first record of the log is the first of these.
        left_bytes: size of what is still to read, a line that is cut short included.
        written_s: time of the last change of the file, in seconds since the epoch.
    """

    records: list[Record]
    starts_over: bool = False
    left_bytes: int = 0
    written_s: float = 0.0


class LogTail:
    """Reader of the records that are appended to a log, at most one chunk at a time.

    A resumed run cuts its log back to a checkpoint and a new run replaces it. Then the log is read again from its first
    line. A last line that is cut short is left for the next call.

    Args:
        path: path of the log, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._start_over()

    def _start_over(self) -> None:
        self._offset = 0
        self._lines = 0
        self._last = b""  # last line that was read
        self._order = RecordOrder()
        self._is_in_long_line = False

    def read(self) -> Increment:
        """Return the next records; none if the log has no further line, or does not exist.

        Raises:
            RunError: the log cannot be read, or a line is no record.
        """
        try:
            with open_regular(self._path) as file:
                return self._read(file)
        except FileNotFoundError:
            return Increment([])
        except OSError as error:
            raise RunError(f"cannot read {self._path}: {error.strerror}; expected the log of a run") from error
        except ContentError as error:
            raise RunError(f"cannot read {self._path}: {error}; expected the log of a run") from error

    def _read(self, file: BinaryIO) -> Increment:
        status = os.fstat(file.fileno())
        starts_over = not self._continues(file, status)
        if starts_over:
            self._start_over()
            self._identity = status.st_dev, status.st_ino
        file.seek(self._offset)
        chunk = file.read(CHUNK_BYTES)
        if left_out := self._of_long_line(chunk):
            self._offset += len(left_out)
            self._last = left_out
            return Increment(
                records=[],
                starts_over=starts_over,
                left_bytes=max(0, status.st_size - self._offset),
                written_s=status.st_mtime,
            )
        lines = self._whole_lines(chunk)
        records = []
        for line in lines:
            self._lines += 1
            records.append(parsed(line, self._order, f"{self._path}, line {self._lines}"))
        self._offset += sum(map(len, lines))
        self._last = lines[-1] if lines else self._last
        return Increment(
            records=records,
            starts_over=starts_over,
            left_bytes=max(0, status.st_size - self._offset),
            written_s=status.st_mtime,
        )

    def _continues(self, file: BinaryIO, status: os.stat_result) -> bool:
        """Return whether the file still begins with all that was read; its last line stands for the whole."""
        if self._identity != (status.st_dev, status.st_ino):
            return False
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last

    def _of_long_line(self, chunk: bytes) -> bytes:
        """Return the beginning of a chunk that belongs to a line that is too long, and is left out with a warning."""
        end = chunk.find(b"\n") + 1
        if not self._is_in_long_line and (end or len(chunk) < CHUNK_BYTES):
            return b""
        if not self._is_in_long_line:
            self._lines += 1
            warn_of_long_line(self._path, self._lines)
        self._is_in_long_line = not end
        return chunk[:end] if end else chunk

    def _whole_lines(self, chunk: bytes) -> list[bytes]:
        whole, newline, _ = chunk.rpartition(b"\n")
        return [line + b"\n" for line in whole.split(b"\n")] if newline else []
