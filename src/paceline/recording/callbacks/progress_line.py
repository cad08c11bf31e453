"""Progress line of one run: redrawn on a terminal and in a notebook, printed every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from paceline.core import records
from paceline.core.stop import Stop
from paceline.recording.callback import Callback
from paceline.recording.callbacks.progress_share import ProgressShare
from paceline.utils.wording import counted

TERMINAL_S = 0.2
NOTEBOOK_S = 0.5
PLAIN_LINE_S = 5.0
GAP = "  "
LEAST_S = 1.0  # shortest observation for an estimate of the remaining time
LONGEST_TITLE = 24

Field = tuple[int, str]  # rank and text; a line that is too long drops the highest ranks first


@contextmanager
def shown(
    progress: bool | None, title: str, stop: Stop, workload: float | None, workers: int
) -> Iterator[list[Callback]]:
    """Yield the progress line of a run as a list of callbacks, empty if it is not shown.

    Args:
        progress: whether to show the line; None for only on a terminal and in a notebook.
        title: name of the run.
        stop: stop conditions of the run.
        workload: number of gradients in the whole run, None if the stop does not fix it.
        workers: number of workers at the start.
    """
    console = stderr_console()
    if not is_shown(progress, console):
        yield []
        return
    with ProgressLine(title, stop, console, workload, workers) as line:
        yield [line]


def stderr_console() -> Console:
    """Return the console of a rich log handler on standard error, so that records go above the line; else a new one."""
    handlers = [*logging.getLogger("paceline").handlers, *logging.getLogger().handlers]
    consoles = (handler.console for handler in handlers if isinstance(handler, RichHandler))
    return next((console for console in consoles if console.stderr), None) or Console(stderr=True)


def is_shown(progress: bool | None, console: Console) -> bool:
    """Return whether progress is shown: as requested, else on a terminal and in a notebook."""
    return (console.is_jupyter or console.file.isatty()) if progress is None else progress


class Surface:
    """Output that shows the current progress line.

    Attributes:
        interval_s: seconds between two drawings.
    """

    interval_s: float

    @property
    def width(self) -> int | None:
        """Largest number of characters in a line, None for no limit."""
        return None

    def draw(self, line: str) -> None:
        """Draw the line, if possible in place of the previous one."""
        raise NotImplementedError

    def end(self) -> None:
        """Keep the last line and release the output."""


class Terminal(Surface):
    """Terminal that redraws the line in place."""

    interval_s = TERMINAL_S

    def __init__(self, console: Console) -> None:
        # The output of the script goes above the line, unless it is redirected to a file.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
        self._live.start()

    @property
    def width(self) -> int | None:
        """Width of the terminal."""
        return self._live.console.width

    def draw(self, line: str) -> None:
        """Redraw the line."""
        self._live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)

    def end(self) -> None:
        """Keep the last line and release the output."""
        self._live.stop()


class Notebook(Surface):
    """Notebook cell whose output is updated; needs only `IPython.display`."""

    interval_s = NOTEBOOK_S
    width = 100

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, line: str) -> None:
        """Update the output."""
        content = {"text/plain": line}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


class Plain(Surface):
    """File or pipe that gets a new line every few seconds."""

    interval_s = PLAIN_LINE_S

    def __init__(self, console: Console) -> None:
        self._console = console

    def draw(self, line: str) -> None:
        """Print the line."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class ProgressLine(Callback):
    """Callback that shows time, updates, loss, metrics, quorum, live workers and the estimated remaining time.

    Args:
        title: name of the run.
        stop: stop conditions; targets are shown beside their values.
        console: console to draw on.
        workload: number of gradients in the whole run, None if the stop does not fix it.
        workers: number of workers at the start, 0 if unknown.
    """

    def __init__(
        self, title: str, stop: Stop, console: Console, workload: float | None = None, workers: int = 0
    ) -> None:
        self._title = title
        self._console = console
        self._surface: Surface | None = None
        self._share = ProgressShare(stop, workload)
        self._live = set(range(workers))
        self._most_workers = workers
        self._drawn_s = time.monotonic()
        self._first: tuple[float, float] | None = None  # time and progress of the first update

    def __enter__(self) -> Self:
        """Start drawing."""
        self._surface = _surface(self._console)
        if not isinstance(self._surface, Plain):
            self._surface.draw(f"{self._title}{GAP}starting")
        return self

    def __exit__(self, *error: object) -> None:
        """Keep the last line and release the output."""
        if self._surface is not None:
            self._surface.end()

    def on_record(self, record: records.Record) -> None:
        """Process the records that change the line."""
        match record:
            case records.RunStarted() | records.RunResumed():
                self._live = set(range(record.workers))
            case records.WorkerJoined():
                self._live.add(record.worker)
            case records.WorkerLost():
                self._live.discard(record.worker)
            case _:
                super().on_record(record)
                return
        self._most_workers = max(self._most_workers, len(self._live))

    def on_update(self, update: records.UpdateMade) -> None:
        """Redraw the line after each interval."""
        self._share.take_update(update)
        now_s = time.monotonic()
        if self._first is None:
            self._first = now_s, self._share.share(update)
        if self._surface is not None and now_s - self._drawn_s >= self._surface.interval_s:
            made = counted(update.version, "update")
            self._draw([(4, f"{update.now_s:.1f} s"), (0, made)], [self._quorum(update), *self._left(update, now_s)])

    def on_evaluate(self, evaluation: records.VersionEvaluated) -> None:
        """Store the metrics for the next drawing."""
        self._share.take_metrics(evaluation.metrics)

    def on_end(self, end: records.RunEnded) -> None:
        """Draw the reason for the end with the last metrics."""
        self._draw([(4, f"{end.now_s:.1f} s"), (0, end.reason)], [])

    def _quorum(self, update: records.UpdateMade) -> Field:
        live, most = len(self._live), self._most_workers
        if not live:
            return (2, f"k {update.k}")
        return (2, f"k {update.k}, {counted(live, 'worker') if live == most else f'{live} of {most} workers'}")

    def _left(self, update: records.UpdateMade, now_s: float) -> list[Field]:
        """Return the estimated remaining time."""
        if self._first is None:
            return []
        first_s, first_share = self._first
        share = self._share.share(update)
        if now_s - first_s < LEAST_S or share <= first_share:
            return []
        return [(1, f"~{duration((now_s - first_s) * (1 - share) / (share - first_share))} left")]

    def _draw(self, before: Sequence[Field], after: Sequence[Field]) -> None:
        """Draw loss and metrics between two groups of fields, with their targets if they fit."""
        self._drawn_s = time.monotonic()
        surface = self._surface
        if surface is None:
            return
        width, title = surface.width, self._title
        if width is not None and len(title) > LONGEST_TITLE:
            title = f"{title[: LONGEST_TITLE - 1]}…"
        for has_targets in (True, False):
            texts = self._share.figures(targets=has_targets)
            figures = [((1, 2, 5)[min(number, 2)], text) for number, text in enumerate(texts)]
            fields = [(3, title), *before, *figures, *after]
            if width is None or len(_joined(fields)) <= width:
                break
        surface.draw(fitted(fields, width))


def fitted(fields: Sequence[Field], width: int | None) -> str:
    """Join the texts to one line; drop those of the highest ranks until it fits `width`.

    >>> fitted([(0, "bsp"), (2, "loss 0.5"), (1, "3 s")], 10)
    'bsp  3 s'
    """
    kept = list(fields)
    while width is not None and len(_joined(kept)) > width and max(kept)[0]:
        last = max(range(len(kept)), key=lambda i: (kept[i][0], i))
        del kept[last]
    return _joined(kept)


def _joined(fields: Sequence[Field]) -> str:
    return GAP.join(text for _, text in fields)


def duration(seconds: float) -> str:
    """Return a time as rounded text.

    >>> duration(8.3), duration(100), duration(9000)
    ('8 s', '2 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _surface(console: Console) -> Surface:
    if console.is_jupyter:
        return Notebook()
    return Terminal(console) if console.is_terminal and not console.is_dumb_terminal else Plain(console)
