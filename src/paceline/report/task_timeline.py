"""Timeline of single tasks: a row per worker, a bar per task, coloured by the fate of its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isnan
from typing import Any, NamedTuple

import numpy as np

from paceline.report.run_data import FATES, RunData

FRESH, STALE, WAITING = "used", "used, stale", "waiting"
UPDATES = 10
STYLES = {  # colour, hatch
    FRESH: ("#0072b2", ""),
    STALE: ("#56b4e9", ""),
    "dropped": ("#d55e00", "///"),
    "interrupted": ("#e6b800", "---"),
    "unfinished": ("#8a7a90", "|||"),
    WAITING: ("#9aa0a640", ""),
}
ROW = 0.76  # height of a bar, in rows
NARROW = 0.025  # share of the axis below which a bar has no number


class Bar(NamedTuple):
    """Time that a worker spent in one way.

    Attributes:
        worker: number of the worker.
        start_s: start in seconds.
        end_s: end in seconds.
        kind: key of `STYLES`.
        staleness: staleness of a used gradient in versions; 0 for any other bar.
    """

    worker: int
    start_s: float
    end_s: float
    kind: str
    staleness: int = 0


def bars_until(run: RunData, end_s: float) -> list[Bar]:
    """Return the bars of all workers up to a time, by worker and time: tasks, and the waiting between them."""
    bars = []
    tasks = [bar for bar in _tasks(run) if bar.start_s < end_s]
    for worker, spans in enumerate(run.live):
        mine = [bar._replace(end_s=min(bar.end_s, end_s)) for bar in tasks if bar.worker == worker]
        bars += sorted([*mine, *_gaps(worker, mine, [span for span in spans if span[0] < end_s], end_s)])
    return bars


def _gaps(worker: int, tasks: list[Bar], spans: list[tuple[float, float]], end_s: float) -> Iterator[Bar]:
    for begin_s, live_until_s in spans:
        free_s = begin_s
        for task in [*tasks, Bar(worker=worker, start_s=min(live_until_s, end_s), end_s=inf, kind=WAITING)]:
            if free_s < task.start_s <= min(live_until_s, end_s):
                yield Bar(worker=worker, start_s=free_s, end_s=task.start_s, kind=WAITING)
            free_s = max(free_s, task.end_s)


def _tasks(run: RunData) -> Iterator[Bar]:
    """Yield the tasks by worker and time.

    Without a server the log has one time for all gradients of an iteration, its end. A worker that does not wait for
    the sum continues from its own contribution, so the beginning of its task is computed. The staleness of a gradient
    that overlaps sums is their number.
    """
    phases: list[dict[str, Any]] = run.run.configuration.get("plan") or [{}]
    allreduce = phases[0].get("allreduce")
    names = ("worker", "version", "start_s", "end_s", "compute_s", "staleness")
    free_s: dict[int, float] = {}
    columns = [*(run.work[name].tolist() for name in names), run.fates]
    for worker, version, start_s, end_s, compute_s, staleness, fate in zip(*columns, strict=True):
        if allreduce is None or isnan(compute_s):
            yield _task(worker, start_s, end_s, FATES[fate], staleness)
            continue
        begin_s = min(free_s.get(worker, inf), start_s)
        lag = allreduce["lag"]
        has_waited = not lag and (version + 1) % allreduce["period"] == 0
        free_s[worker] = end_s if has_waited else max(begin_s + compute_s, start_s)
        yield _task(worker, begin_s, begin_s + compute_s, FATES[fate], min(lag, version))


def _task(worker: int, start_s: float, end_s: float, fate: str, staleness: int) -> Bar:
    is_stale = fate == FRESH and staleness > 0
    return Bar(
        worker=worker,
        start_s=start_s,
        end_s=end_s,
        kind=STALE if is_stale else fate,
        staleness=staleness if is_stale else 0,
    )


def draw_tasks(figure: Any, run: RunData, updates: int = UPDATES) -> None:
    """Draw the tasks up to an update; a vertical line is an update, and a number in a bar the staleness.

    Args:
        figure: figure of matplotlib.
        run: data of the run.
        updates: number of updates, >= 1; a shorter run is drawn to its end.
    """
    times_s = run.updates["time_s"][:updates]
    end_s = float(times_s[-1]) if len(times_s) else run.end_s
    figure.set_size_inches(8.0, 1.1 + 0.32 * max(run.workers, 2))
    axes = figure.subplots()
    bars = bars_until(run, end_s)
    for kind, (colour, hatch) in STYLES.items():
        chosen = [bar for bar in bars if bar.kind == kind]
        if chosen:
            rows, starts_s, ends_s = zip(*((bar.worker, bar.start_s, bar.end_s) for bar in chosen), strict=True)
            edge = {"edgecolor": "white", "linewidth": 0 if kind == WAITING else 0.8}
            axes.barh(rows, np.subtract(ends_s, starts_s), ROW, starts_s, label=kind, color=colour, hatch=hatch, **edge)
    for bar in bars:
        if bar.staleness and bar.end_s - bar.start_s > NARROW * end_s:
            middle_s = (bar.start_s + bar.end_s) / 2
            axes.text(middle_s, bar.worker, bar.staleness, ha="center", va="center", color="black", fontsize=8)
    axes.vlines(times_s, -0.5, max(run.workers, 1) - 0.5, colors="#d6006c", linewidth=1, label="update")
    axes.set(xlabel="seconds", ylabel="worker", xlim=(0, end_s or 1), ylim=(max(run.workers, 1) - 0.5, -0.5))
    axes.set_yticks(range(0, max(run.workers, 1), 1 + run.workers // 24))
    figure.legend(loc="outside upper center", ncols=len(STYLES) + 1, frameon=False)
