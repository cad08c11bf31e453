"""Rows of numbers in a CSV file that loses at most five seconds if its process is killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from paceline.ddp_recording.layout import FLUSH_ROWS, FLUSH_S


class RowFile:
    """Writer of a CSV file: rows are written in one call every `FLUSH_ROWS` rows or `FLUSH_S` seconds.

    An error of the disk ends the recording with one line on stderr, and never reaches the script.

    Args:
        path: file to create; it must not exist.
        columns: names of the columns.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        self._rows: list[Sequence[float]] = []
        self._pid = os.getpid()
        self._flushed_s = -FLUSH_S  # the first row is written at once
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._write(",".join(columns) + "\n")

    def add(self, row: Sequence[float]) -> None:
        """Add a row, and write the rows if it is time."""
        self._rows.append(row)
        if len(self._rows) >= FLUSH_ROWS or monotonic() - self._flushed_s >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write the rows that are not in the file yet; a forked child writes nothing."""
        if os.getpid() != self._pid:
            return
        rows, self._rows = self._rows, []
        self._flushed_s = monotonic()
        self._write("".join(",".join(map(repr, row)) + "\n" for row in rows))

    def _write(self, text: str) -> None:
        if self._file is None or not text:
            return
        try:
            os.write(self._file, text.encode())
        except OSError as error:
            self._file = None
            print(f"paceline: recording ends, cannot write {self._path}: {error.strerror}", file=sys.stderr)
