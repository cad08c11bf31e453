"""Scalars of a run for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.core.records import Record, RunEnded, VersionEvaluated
from paceline.errors import UsageError
from paceline.recording.callback import Callback, RunInfo
from paceline.recording.callbacks.tracker import warn_of_failure
from paceline.recording.scalars import ScalarPoint, Scalars
from paceline.utils.argument_types import checked_types
from paceline.utils.files import refuse_link

FLUSH_S = 5


@checked_types
class TensorBoard(Callback):
    """Callback that writes updates and evaluations as TensorBoard scalars.

    The step is the version, the wall time is the time on the run's clock. If the event file cannot be written, the
    failure is logged and the run continues without it.

    Args:
        folder: folder of the event files; a new run replaces them, a resumed run continues them.

    Raises:
        UsageError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError("tensorboard is not installed; run: pip install 'paceline[tensorboard]'") from error
        self._folder = Path(folder)
        self._make_writer = SummaryWriter

    def on_start(self, run: RunInfo) -> None:
        """Begin without scalars."""
        self._writer: Any = None
        self._scalars = Scalars()
        self._has_failed = False

    def on_resume(self, history: Iterable[Record]) -> None:
        """Purge the scalars after the last evaluation, and write those of the kept updates again."""
        again: list[ScalarPoint] = []
        evaluated = 0
        for record in history:
            self._scalars.add(record)
            if isinstance(record, VersionEvaluated):
                evaluated = record.version
                again = [point for point in again if point.version > evaluated]
            elif point := self._scalars.of(record):
                again.append(point)
        with self._left_out_if_it_fails():
            self._open(evaluated + 1)
            for point in again:
                self._add(point)

    def on_record(self, record: Record) -> None:
        """Write the scalars of an update or an evaluation."""
        self._scalars.add(record)
        if not self._has_failed:
            with self._left_out_if_it_fails():
                self._write(record)

    @contextmanager
    def _left_out_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._has_failed = True
            self._writer = None
            warn_of_failure(f"TensorBoard in {self._folder}", error)

    def _write(self, record: Record) -> None:
        if self._writer is None:
            for old in self._folder.glob("events.out.tfevents.*"):
                old.unlink()
            self._open()
        if point := self._scalars.of(record):
            self._add(point)
        if isinstance(record, RunEnded):
            self._writer.close()

    def _add(self, point: ScalarPoint) -> None:
        for tag, value in point.values.items():
            self._writer.add_scalar(tag, value, point.version, walltime=point.time_s)

    def _open(self, first_version: int | None = None) -> None:
        refuse_link(self._folder)
        self._writer = self._make_writer(self._folder, purge_step=first_version, flush_secs=FLUSH_S)
