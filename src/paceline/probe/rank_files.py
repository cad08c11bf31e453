"""Files that one rank writes while it is recorded."""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.ddp_recording import layout
from paceline.probe.row_file import RowFile
from paceline.probe.step_timer import Row


class RankFiles:
    """Header, steps and gradient samples of one rank.

    The header is written when torch has been imported, so that a script without DDP leaves a trace, and again when more
    is known. The other files are created by the first model.

    Args:
        attempt: folder of this start of the ranks.
        rank: number of the rank.
        sample_every: steps between two samples of the gradient; 0 for none.
    """

    def __init__(self, attempt: Path, rank: int, sample_every: int) -> None:
        self._attempt = attempt
        self._path = layout.header_file(attempt, rank)
        self._rank = rank
        self._header: dict[str, Any] = {
            "schema": layout.SCHEMA,
            "rank": rank,
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "sample_every": sample_every,
            "started_unix_s": time.time(),
            "batch_size": None,
            "models": [],
        }
        self._steps: RowFile | None = None
        self._gradients: RowFile | None = None
        self._collectives: RowFile | None = None
        attempt.mkdir(parents=True, exist_ok=True)
        if not self._path.exists():  # a worker process of a DataLoader has the same rank
            self._write_header()

    def open(self) -> None:
        """Create the files of steps and gradients."""
        if self._steps is None:
            self._steps = RowFile(layout.steps_file(self._attempt, self._rank), layout.STEP_COLUMNS)
            self._gradients = RowFile(layout.gradients_file(self._attempt, self._rank), layout.GRADIENT_COLUMNS)
            atexit.register(self.flush)

    def describe(self, **facts: Any) -> None:
        """Add facts to the header, and write it."""
        self._header.update(facts)
        self._write_header()

    def add_step(self, row: Row) -> None:
        """Add the row of a finished step."""
        if self._steps is not None:
            self._steps.add(row)

    def add_gradient(self, step: int, loss: float, local_squared_norm: float, mean_squared_norm: float) -> None:
        """Add the sample of a step, which is written at once."""
        if self._gradients is not None:
            self._gradients.add((step, loss, local_squared_norm, mean_squared_norm))
            self._gradients.flush()

    def add_collectives(self, rows: Iterable[Sequence[int]]) -> None:
        """Add collectives of a script without DDP, which are written at once."""
        if self._collectives is None:
            path = layout.collectives_file(self._attempt, self._rank)
            self._collectives = RowFile(path, layout.COLLECTIVE_COLUMNS)
        for row in rows:
            self._collectives.add(row)
        self._collectives.flush()

    def flush(self) -> None:
        """Write the rows that are not in the files yet."""
        for file in (self._steps, self._gradients):
            if file is not None:
                file.flush()

    def _write_header(self) -> None:
        unfinished = self._path.with_suffix(f".unfinished-{os.getpid()}")
        unfinished.write_text(json.dumps(self._header, indent=2) + "\n")
        unfinished.replace(self._path)
