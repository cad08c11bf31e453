"""Output of ranks: each line on the terminal begins with the number of its rank, or each rank has a file of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO

from paceline.clusters.launch_settings import LaunchSettings
from paceline.utils.files import open_to_append

CHUNK_BYTES, MOST_CHUNKS = 65536, 16  # that are read at a time: a rank may print faster than they are shown
LONGEST_LINE_BYTES = 65536  # of a line whose end has not come, before it is written as it is


class LabelledLines:
    """Writer of whole lines, each with a label before it.

    Of a line that is written over itself (carriage returns, as of a progress bar) the last text is kept, which a
    terminal would show.

    Args:
        label: text before each line.
        write: function that writes bytes.
    """

    def __init__(self, label: str, write: Callable[[bytes], None]) -> None:
        self._label = label.encode()
        self._write = write
        self._pending = b""

    def write(self, chunk: bytes) -> None:
        """Write the lines that a chunk ends."""
        *lines, rest = (self._pending + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE_BYTES:
            lines.append(rest)
            rest = b""
        self._pending = rest if rest.endswith(b"\r") else rest.rpartition(b"\r")[2]
        if lines:
            self._write(b"".join(map(self._line, lines)))

    def close(self) -> None:
        """Write what is left of a line without an end."""
        if self._pending:
            self._write(self._line(self._pending))
            self._pending = b""

    def _line(self, text: bytes) -> bytes:
        return self._label + text.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"


class Pipe:
    """Pipe from a rank and from what it has started.

    Args:
        stream: pipe to read from.
        lines: lines on the terminal; None if they are not shown.
        file: file that gets all bytes; None without one.
    """

    def __init__(self, stream: IO[bytes], lines: LabelledLines | None, file: IO[bytes] | None) -> None:
        self.stream = stream
        self._lines = lines
        self._file = file
        os.set_blocking(stream.fileno(), False)

    def pass_on(self) -> bool:
        """Write what is there, at most `MOST_CHUNKS`, and return whether more may come."""
        with suppress(BlockingIOError):
            for _ in range(MOST_CHUNKS):
                chunk = os.read(self.stream.fileno(), CHUNK_BYTES)
                if not chunk:
                    return False
                if self._file is not None:
                    self._file.write(chunk)
                if self._lines is not None:
                    self._lines.write(chunk)
        return True

    def close(self) -> None:
        """Write what is left of a line, and close the pipe."""
        if self._lines is not None:
            self._lines.close()
        self.stream.close()


class RankOutput:
    """Output of the ranks of a host.

    Without a folder, several ranks share the terminal, and each line begins with the number of its rank; a single rank
    has the terminal for itself. With a folder each rank has a file there, ``rank-2.log``, and the terminal shows the
    first rank.

    Args:
        settings: ranks of this host.
        folder: folder of the files, which exists; None for none.
        on_closed: function that is called when nothing reads the terminal any longer.
    """

    def __init__(self, settings: LaunchSettings, folder: Path | None, on_closed: Callable[[], None]) -> None:
        ranks = settings.ranks
        self._first = ranks[0]
        self._is_labelled = folder is None and settings.world_size > 1
        self._files: dict[int, IO[bytes]] = {}
        try:
            if folder is not None:
                for rank in ranks:
                    self._files[rank] = open_to_append(folder / f"rank-{rank}.log")
        except OSError:
            self.close()
            raise
        self._on_closed = on_closed
        self._is_closed = False

    @property
    def is_piped(self) -> bool:
        """Whether the output passes through the launcher."""
        return self._is_labelled or bool(self._files)

    def pipes(self, rank: int, streams: Sequence[IO[bytes]]) -> list[Pipe]:
        """Return the pipes of a process of a rank.

        Args:
            rank: number of the rank.
            streams: its standard output and standard error.
        """
        label = f"[rank {rank}] " if self._is_labelled else ""
        is_shown = rank == self._first or not self._files
        lines = [LabelledLines(label, partial(self._show, shown)) if is_shown else None for shown in self._terminal()]
        return [Pipe(stream, each, self._files.get(rank)) for stream, each in zip(streams, lines, strict=False)]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _terminal(self) -> tuple[BinaryIO, BinaryIO]:
        return sys.stdout.buffer, sys.stderr.buffer

    def _show(self, stream: BinaryIO, text: bytes) -> None:
        if self._is_closed:
            return
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            self._is_closed = True
            self._on_closed()
