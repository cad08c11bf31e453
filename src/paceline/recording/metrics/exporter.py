"""Base of the callbacks that export the metrics of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable

from paceline.core.records import Record, UpdateMade
from paceline.recording.callback import Callback, RunInfo
from paceline.recording.metrics.run_measurements import RunMeasurements


class MetricsExporter(Callback):
    """Callback that keeps the measurements of a run up to date.

    Attributes:
        run: measurements of the run, after `on_start`.
    """

    run: RunMeasurements

    def on_start(self, run: RunInfo) -> None:
        """Begin without records."""
        self.run = RunMeasurements(run.totals, run.network)

    def on_resume(self, history: Iterable[Record]) -> None:
        """Add the earlier records of a resumed run."""
        for record in history:
            self.run.add(record)

    def on_record(self, record: Record) -> None:
        """Add a record."""
        self.run.add(record)
        if type(record) is UpdateMade:
            self.run.updated_s = time.time()
