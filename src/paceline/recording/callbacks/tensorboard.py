"""Scalars of a run for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.core.records import Record, RunEnded, UpdateMade, VersionEvaluated
from paceline.errors import UsageError
from paceline.recording.callback import KEPT, Callback
from paceline.recording.history import Totals, idle_share
from paceline.utils.argument_types import checked_types
from paceline.utils.files import refuse_link, writing

FLUSH_S = 5


@checked_types
class TensorBoard(Callback):
    """Callback that writes updates and evaluations as TensorBoard scalars.

    The step is the version, the wall time is the time on the run's clock.

    Args:
        folder: folder of the event files; a new run replaces them, a resumed run continues them.

    Raises:
        UsageError: tensorboard is not installed.
        RunError: the event file cannot be written during the run.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError("tensorboard is not installed; run: pip install 'paceline[tensorboard]'") from error
        self._folder = Path(folder)
        self._make_writer = SummaryWriter
        self._writer: Any = None
        self._totals = Totals()

    def on_resume(self, history: Iterable[Record]) -> None:
        """Purge the scalars after the last evaluation, and write those of the kept updates again."""
        again: list[tuple[int, float, dict[str, float]]] = []
        evaluated = 0
        for record in history:
            self._totals.count(record)
            match record:
                case UpdateMade():
                    again.append((record.version, record.now_s, self._of_update(record)))
                case VersionEvaluated():
                    evaluated = record.version
                    again = [update for update in again if update[0] > evaluated]
        with writing(self._folder, KEPT):
            self._open(evaluated + 1)
            for update in again:
                self._scalars(*update)

    def on_record(self, record: Record) -> None:
        """Write the scalars of an update or an evaluation."""
        self._totals.count(record)
        with writing(self._folder, KEPT):
            self._write(record)

    def _write(self, record: Record) -> None:
        if self._writer is None:
            for old in self._folder.glob("events.out.tfevents.*"):
                old.unlink()
            self._open()
        match record:
            case UpdateMade():
                self._scalars(record.version, record.now_s, self._of_update(record))
            case VersionEvaluated():
                metrics = {f"eval/{name}": value for name, value in record.metrics.items()}
                self._scalars(record.version, record.published_s, metrics)
            case RunEnded():
                self._writer.close()

    def _of_update(self, update: UpdateMade) -> dict[str, float]:
        return {
            "train/loss": update.loss,
            "train/learning_rate": update.learning_rate,
            "update/k": update.k,
            "update/staleness": update.staleness,
            "workers/idle_share": idle_share(update.busy_s, update.live_s),
            "gradients/dropped": self._totals.dropped,
            "gradients/interrupted": self._totals.interrupted,
        }

    def _scalars(self, version: int, time_s: float, scalars: dict[str, float]) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, version, walltime=time_s)

    def _open(self, first_version: int | None = None) -> None:
        refuse_link(self._folder)
        self._writer = self._make_writer(self._folder, purge_step=first_version, flush_secs=FLUSH_S)
