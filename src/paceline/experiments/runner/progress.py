"""Progress of the runs of a comparison: messages from the runs, and progress bars that show them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from paceline.core.records import UpdateMade, VersionEvaluated
from paceline.core.stop import Stop
from paceline.experiments.runner.cell import RunSpec
from paceline.recording.callback import Callback
from paceline.recording.callbacks.progress_share import ProgressShare
from paceline.utils.wording import counted

REPORT_S = 0.2
PLAIN_LINES_S = 10.0


class RunProgress(NamedTuple):
    """Progress of one run.

    Attributes:
        now_s: seconds on the clock of the run.
        updates: number of updates so far.
        share: share of the run that is done, 0 to 1, by the stop condition that is nearest.
        metrics: loss and metrics, each as a short text.
    """

    now_s: float
    updates: int
    share: float
    metrics: Sequence[str]

    def __str__(self) -> str:
        return "  ".join([f"{self.now_s:.1f} s", counted(self.updates, "update"), *self.metrics])


class ProgressReporter(Callback):
    """Callback that sends the progress of a run at intervals.

    Args:
        stop: stop of the run.
        workload: number of gradients of the whole run; None if the stop does not fix it.
        send: function that receives the progress.
    """

    def __init__(self, stop: Stop, workload: float | None, send: Callable[[RunProgress], object]) -> None:
        self._share = ProgressShare(stop, workload)
        self._send = send
        self._sent_s = time.monotonic()

    def on_update(self, update: UpdateMade) -> None:
        """Record the loss, and send the progress if the interval has passed."""
        self._share.take_update(update)
        if time.monotonic() - self._sent_s >= REPORT_S:
            self._sent_s = time.monotonic()
            share = self._share.share(update)
            self._send(
                RunProgress(
                    now_s=update.now_s, updates=update.version, share=share, metrics=self._share.figures(targets=False)
                )
            )

    def on_evaluate(self, evaluation: VersionEvaluated) -> None:
        """Record the metrics."""
        self._share.take_metrics(evaluation.metrics)


class ProgressBars:
    """Progress bars: a bar for each run in progress, and a line for each run that has ended.

    On a console that is not a terminal, it prints these lines, and the progress every ten seconds.

    Args:
        console: console to draw on.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=14),
            TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bars: dict[RunSpec, TaskID] = {}
        self._latest: dict[RunSpec, RunProgress] = {}
        self._whole = TaskID(0)
        self._printed_s = time.monotonic()

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop drawing; the lines of the runs that have ended remain."""
        self._progress.stop()

    def plan(self, cells: int, finished: int) -> None:
        """Set the number of runs, and how many of them have finished before."""
        self._whole = self._progress.add_task("all runs", total=cells, completed=finished, status="")
        self._count()
        if finished:
            self._print(f"{finished} of {counted(cells, 'run')} {'is' if finished == 1 else 'are'} finished already")

    def begin(self, cell: RunSpec) -> None:
        """Add the bar of a run that begins."""
        self._bars[cell] = self._progress.add_task(escape(str(cell)), total=1.0, status="starting")

    def show(self, cell: RunSpec, progress: RunProgress) -> None:
        """Update the bar of a run."""
        self._progress.update(self._bars[cell], completed=progress.share, status=str(progress))
        self._latest[cell] = progress
        if not self._console.is_terminal and time.monotonic() - self._printed_s >= PLAIN_LINES_S:
            self._printed_s = time.monotonic()
            for each, latest in self._latest.items():
                self._print(f"{each}  {latest}")

    def end(self, cell: RunSpec, time_s: float | None, reason: str) -> None:
        """Replace the bar of a run by a line; the time on its clock is None if it crashed."""
        self._progress.remove_task(self._bars.pop(cell))
        self._latest.pop(cell, None)
        self._print(f"{cell}  {reason}" if time_s is None else f"{cell}  {time_s:.2f} s  {reason}")
        self._progress.advance(self._whole)
        self._count()

    def _count(self) -> None:
        if self._console.is_terminal:
            whole = next(task for task in self._progress.tasks if task.id == self._whole)
            self._progress.update(self._whole, status=f"{whole.completed:.0f} of {counted(whole.total or 0, 'run')}")

    def _print(self, text: str) -> None:
        """Print a line, wrapped between words on a terminal only."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)
