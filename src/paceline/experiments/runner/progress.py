"""How the runs of a comparison are doing: small messages from wherever they run, drawn in one place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
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

TELL_S = 0.2
PLAIN_LINES_S = 10.0


class News(NamedTuple):
    """How a run is doing.

    Attributes:
        share: of the way to its end, 0 to 1, by the condition that is nearest.
        figures: loss and metrics, each a short text.
    """

    now_s: float
    updates: int
    share: float
    figures: Sequence[str]

    def __str__(self) -> str:
        return "  ".join([f"{self.now_s:.1f} s", counted(self.updates, "update"), *self.figures])


class Reporter(Callback):
    """Tells the news of a run now and then.

    Args:
        stop: of the run.
        workload: gradients of the whole run, None if the stop does not fix them.
        tell: is given the news.
    """

    def __init__(self, stop: Stop, workload: float | None, tell: Callable[[News], object]) -> None:
        self._share = ProgressShare(stop, workload)
        self._tell = tell
        self._told_s = time.monotonic()

    def on_update(self, update: UpdateMade) -> None:
        """Take in the loss, and send news if it is time to."""
        self._share.take_update(update)
        if time.monotonic() - self._told_s >= TELL_S:
            self._told_s = time.monotonic()
            share = self._share.share(update)
            self._tell(News(update.now_s, update.version, share, self._share.figures(targets=False)))

    def on_evaluate(self, evaluation: VersionEvaluated) -> None:
        """Take in the metrics."""
        self._share.take_metrics(evaluation.metrics)


class ProgressBars:
    """Draws a bar for each run that is going on, and leaves a line for each that has ended.

    On something that is not a terminal, it prints those lines, and the news every ten seconds.

    Args:
        console: where to draw.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=14),
            TextColumn("{task.fields[news]}", table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bars: dict[RunSpec, TaskID] = {}
        self._news: dict[RunSpec, News] = {}
        self._whole = TaskID(0)
        self._printed_s = time.monotonic()

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Leave the lines of what has ended."""
        self._progress.stop()

    def plan(self, cells: int, finished: int) -> None:
        """Hear how many runs there are, and how many of them are finished already."""
        self._whole = self._progress.add_task("all runs", total=cells, completed=finished, news="")
        self._count()
        if finished:
            self._say(f"{finished} of {counted(cells, 'run')} {'is' if finished == 1 else 'are'} finished already")

    def begin(self, cell: RunSpec) -> None:
        """Hear that a run begins."""
        self._bars[cell] = self._progress.add_task(escape(str(cell)), total=1.0, news="starting")

    def show(self, cell: RunSpec, news: News) -> None:
        """Hear how a run is doing."""
        self._progress.update(self._bars[cell], completed=news.share, news=str(news))
        self._news[cell] = news
        if not self._console.is_terminal and time.monotonic() - self._printed_s >= PLAIN_LINES_S:
            self._printed_s = time.monotonic()
            for each, latest in self._news.items():
                self._say(f"{each}  {latest}")

    def end(self, cell: RunSpec, time_s: float | None, reason: str) -> None:
        """Hear that a run has ended, at a time of its clock if it came to an end of its own."""
        self._progress.remove_task(self._bars.pop(cell))
        self._news.pop(cell, None)
        self._say(f"{cell}  {reason}" if time_s is None else f"{cell}  {time_s:.2f} s  {reason}")
        self._progress.advance(self._whole)
        self._count()

    def _count(self) -> None:
        if self._console.is_terminal:
            whole = next(task for task in self._progress.tasks if task.id == self._whole)
            self._progress.update(self._whole, news=f"{whole.completed:.0f} of {counted(whole.total or 0, 'run')}")

    def _say(self, text: str) -> None:
        """Print a line, broken between words on a terminal and whole elsewhere."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)
