"""Live view of a run in the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.recording.validation import believed
from paceline.report.page.parts import memory_sentences
from paceline.report.run_data import FATES
from paceline.report.summary_table import number
from paceline.report.worker_stats import QUANTILES
from paceline.utils.wording import counted
from paceline.watch.follow import POLL_S
from paceline.watch.live_view import BYTES, LiveView
from paceline.watch.watcher import SILENT_S, State, Watcher

BLOCKS = "▁▂▃▄▅▆▇█"
MEDIAN = QUANTILES.index(50)
SLOWEST = QUANTILES.index(95)
LEAST_ROWS = 4  # of workers, also on a low terminal
OTHER_ROWS = 17  # of the view, without the workers
MARKS = 4
MOST_LOST = 3  # workers
RECENT = 12  # tasks of a worker
STYLES = {State.RUNNING: "green", State.SILENT: "yellow", State.STOPPED: "red"}


def watch_in_terminal(folder: Path, console: Console) -> bool:
    """Show a run until it ends or has stopped, and return whether it has stopped without an end.

    Where the output is no terminal, only print the state of the run now.

    Args:
        folder: folder of the run.
        console: console to draw on.

    Raises:
        RunError: the log cannot be read.
        UsageError: the log holds what no run writes.
    """
    with believed(folder):
        if console.is_terminal:
            return _follow(Watcher(folder), console)
        console.print(shown(_caught_up(Watcher(folder)), console))
        return False


def _follow(watcher: Watcher, console: Console) -> bool:
    with Live(shown(watcher, console), console=console, auto_refresh=False) as live:
        while watcher.state is not State.ENDED:
            if watcher.state is State.STOPPED and watcher.age_s >= SILENT_S:  # until then it may be restarted
                return True
            is_behind = watcher.poll()
            live.update(shown(watcher, console), refresh=True)
            if not is_behind:
                time.sleep(POLL_S)
    return False


def _caught_up(watcher: Watcher) -> Watcher:
    while watcher.poll():
        pass
    return watcher


def shown(watcher: Watcher, console: Console) -> RenderableType:
    """Return the view of a run now, for a console of any width."""
    state = Text(watcher.describe(), style=STYLES.get(watcher.state, ""))
    if watcher.live is None:
        return state
    view = LiveView(watcher.live)
    width = console.width
    losses = _losses(view)
    rows = max(LEAST_ROWS, (console.height if console.is_terminal else 10_000) - OTHER_ROWS - len(losses))
    parts: list[RenderableType] = [
        Text(view.headline, style="bold"),
        state,
        *_curves(view, width),
        *_sums(view),
        _workers(view, rows),
        *[Text(f"! {sentence}", style="yellow") for sentence in view.stragglers],
        *losses,
        Text(view.quorum, overflow="ellipsis", no_wrap=True),
        *_marks(view),
    ]
    return Group(*parts)


def _curves(view: LiveView, width: int) -> list[Text]:
    columns = view.live.progress.columns()
    names = ("loss",) if view.live.shares is not None else ("loss", "k", "staleness")
    curves = [(name, columns[name].tolist()) for name in names]
    curves += [(f"eval {name}", points.columns()["value"].tolist()) for name, points in view.live.metrics.items()]
    return [
        Text(f"{name[:14]:14} {sparkline(values, max(10, width - 42))} {_range(values)}", no_wrap=True)
        for name, values in curves
        if any(map(isfinite, values))
    ]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve as block characters; the mean of the values that share a column.

    >>> sparkline([1.0, 2.0, 3.0, 4.0], 2), sparkline([5.0, 5.0], 4)
    ('▁█', '▁▁')
    """
    known = [value for value in values if isfinite(value)]
    width = min(width, len(known))
    edges = [i * len(known) // width for i in range(width + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(BLOCKS[int((mean - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for mean in means)


def _range(values: Sequence[float]) -> str:
    known = [value for value in values if isfinite(value)]
    return f"{known[-1]:.4g} ({min(known):.3g} to {max(known):.3g})"


def _sums(view: LiveView) -> list[Text]:
    total_s = sum(view.activities.values()) or 1.0
    shares = ", ".join(f"{name} {seconds / total_s:.0%}" for name, seconds in view.activities.items())
    moved = [f"{name} {view.cells[name]}" for name in BYTES if name in view.cells]
    queue = view.live.shares.queue if view.live.shares is not None else ""
    memory = memory_sentences([view.recent])
    return [Text(line) for line in (f"worker time: {shares}", queue, ", ".join(moved), *memory) if line]


def _workers(view: LiveView, rows: int) -> Table:
    """Return a table of the workers, the slowest first if there are too many."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", caption_justify="left")
    shares = view.live.shares
    own = ("samples", "waited") if shares is not None else ("tasks", "used")
    for name in ("worker", "round trip", "95 %", *own, "last task"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("recent", no_wrap=True)
    tasks, used = view.live.counts(view.recent)
    medians = {w: row.quantiles_s[MEDIAN] if row else 0.0 for w, row in enumerate(view.round_trips)}
    chosen = sorted(sorted(medians, key=lambda worker: -medians[worker])[:rows])
    for worker in chosen:
        row = view.round_trips[worker]
        times = [f"{row.quantiles_s[i]:.3g} s" if row else "" for i in (MEDIAN, SLOWEST)]
        counts = shares.cells(worker) if shares is not None else (f"{tasks[worker]:,}", f"{used[worker]:,}")
        cells: list[str | Text] = [str(worker), *times, *counts, *_recent(view, worker)]
        table.add_row(*cells)
    slowest = f"the slowest {len(chosen)} of {len(medians)} workers; " if len(medians) > len(chosen) else ""
    table.caption = f"{slowest}recent: u used, d dropped, i interrupted, - unfinished"
    return table


def _recent(view: LiveView, worker: int) -> tuple[str, Text]:
    """Return the age of the last task of a worker, and the fates of its latest tasks."""
    recent = view.recent
    mine = recent.work["worker"] == worker
    if not mine.any():
        return "", Text()
    age_s = recent.end_s - float(recent.work["end_s"][mine][-1])
    colours = dict(zip(FATES, ("blue", "red", "yellow", "magenta"), strict=True))
    letters = Text()
    for fate in recent.fates[mine][-RECENT:]:
        letters.append("udi-"[fate], style=colours[FATES[fate]])
    return f"{age_s:.3g} s ago", letters


def _losses(view: LiveView) -> list[Text]:
    """Return a line on each of the workers with the largest hazards of loss."""
    return [
        Text(
            f"! worker {row.worker} was lost {counted(row.losses, 'time')}; expected in an hour: "
            f"{number(3600 * row.hazard)}",
            style="yellow",
        )
        for row in view.losses[:MOST_LOST]
    ]


def _marks(view: LiveView) -> list[Text]:
    return [
        Text(f"{mark.time_s:.5g} s  {mark.kind}: {mark.reason}", overflow="ellipsis", no_wrap=True, style="dim")
        for mark in view.recent.marks[: -MARKS - 1 : -1]
    ]
