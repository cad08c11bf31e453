"""Figures of the report as PNG and SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.report import worker_stats
from paceline.report.curves import AXES, Group, panels, switches
from paceline.report.run_data import FATES, RunData
from paceline.report.task_timeline import draw_tasks
from paceline.utils.files import replace_file, writing

COLOURS = ("#0072b2", "#d55e00", "#00805c", "#b0508a", "#8a6d00", "#404852")  # equal to those in style.css
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (8, 2)))
FATE_COLOURS = dict(
    zip((*FATES, worker_stats.IDLE), ("#0072b2", "#d55e00", "#e6b800", "#8a7a90", "#e6e8ec"), strict=True)
)
FATE_COLOURS |= dict(zip(worker_stats.ACTIVITIES, ("#0072b2", "#b0508a", "#e6e8ec"), strict=True))
# A pattern for each, for colour-blind readers, as in ink.js.
FATE_HATCHES = dict(
    zip(
        (*FATES, worker_stats.IDLE, *worker_stats.ACTIVITIES),
        ("", "///", "---", "|||", "", "", "\\\\\\", ""),
        strict=True,
    )
)
FORMATS = ("png", "svg")
TIMELINE_COLUMNS = 1_200
WIDTH_IN = 8.0
UPPER_QUARTILE = worker_stats.QUANTILES.index(75)


def figure_class() -> Any:
    """Return the class of matplotlib's figures.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(f"figures need matplotlib ({error}); run: pip install 'paceline[figures]'") from error
    return Figure


def write_figures(runs: Sequence[RunData], groups: Sequence[Group], folder: Path) -> None:
    """Write all figures; the file names of several runs have their number and label.

    Raises:
        UsageError: matplotlib is not installed.
        RunError: the folder cannot be written.
    """
    new_figure = figure_class()
    makers: dict[str, Callable[[Any], None]] = {
        f"progress-{axis}": partial(draw_progress, groups=groups, axis=axis) for axis in AXES
    }
    makers["worker-seconds"] = partial(
        draw_shares, runs=runs, measure=worker_stats.worker_seconds, title="share of worker-seconds"
    )
    makers["activities"] = partial(
        draw_shares, runs=runs, measure=worker_stats.activities, title="share of worker-seconds"
    )
    makers["samples"] = partial(draw_shares, runs=runs, measure=worker_stats.samples, title="share of samples")
    for number, run in enumerate(runs, start=1):
        suffix = f"-{number}-{_slug(run.label)}" if len(runs) > 1 else ""
        makers |= {f"{name}{suffix}": partial(draw, run=run) for name, draw in ONE_RUN.items()}
    with writing(f"figures to {folder}", "; give another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, make in makers.items():
            figure = new_figure(figsize=(WIDTH_IN, 3.4), layout="constrained", dpi=150)
            make(figure)
            for kind in FORMATS:
                drawn = BytesIO()
                figure.savefig(drawn, format=kind)
                replace_file(folder / f"{name}.{kind}", drawn.getvalue())


def draw_progress(figure: Any, groups: Sequence[Group], axis: str) -> None:
    """Draw loss, metrics and quorum in one column of panels."""
    titles = panels(groups)
    names = [name for name in titles if any(name in group.lines[axis] for group in groups)] or ["loss"]
    figure.set_size_inches(WIDTH_IN, 1.0 + 2.1 * len(names))
    for panel, name in zip(np.ravel(figure.subplots(len(names), sharex=True)), names, strict=True):
        for number, group in enumerate(groups):
            line = group.lines[axis].get(name)
            if line is None:
                continue
            style = {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)]}
            drawstyle = "steps-pre" if line.steps else "default"
            panel.plot(line.x, line.mean, label=_plain(group.label), drawstyle=drawstyle, **style)
            panel.fill_between(line.x, line.low, line.high, color=style["color"], alpha=0.22, linewidth=0)
            for switch in switches(group.runs[0]):
                panel.axvline(switch[axis], color=style["color"], linestyle=":", linewidth=1)
        panel.set_ylabel(_plain(titles[name]))
        if name == "k":
            panel.set_ylim(bottom=0)
        panel.grid(axis="y", alpha=0.3)
    panel.set_xlabel(AXES[axis])
    if panel.get_legend_handles_labels()[0]:
        figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=2)


def draw_shares(figure: Any, runs: Sequence[RunData], measure: Callable[[RunData], dict[str, Any]], title: str) -> None:
    """Draw one stacked bar per run."""
    figure.set_size_inches(WIDTH_IN, 1.4 + 0.4 * len(runs))
    axes = figure.subplots()
    table = [measure(run) for run in runs]
    left = np.zeros(len(runs))
    for fate in table[0]:
        share = np.array([parts[fate] / (sum(parts.values()) or 1) for parts in table])
        style = {"color": FATE_COLOURS[fate], "hatch": FATE_HATCHES[fate], "edgecolor": "white", "linewidth": 0}
        axes.barh([_plain(run.label) for run in runs], share, left=left, label=fate, **style)
        left += share
    axes.set(xlabel=title, xlim=(0, 1))
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=len(table[0]))


def draw_timeline(figure: Any, run: RunData) -> None:
    """Draw one row per worker, with the shares of the fates stacked in each slice of time.

    The ticks at the top are updates.
    """
    axes = _worker_axes(figure, run)
    edges_s = np.linspace(0, run.end_s, TIMELINE_COLUMNS + 1)
    for worker, shares in enumerate(worker_stats.coverage(run, TIMELINE_COLUMNS)):
        tops = worker + 0.45 - 0.9 * np.vstack([np.zeros(TIMELINE_COLUMNS), np.cumsum(shares, axis=0)])
        for begin_s, end_s in run.live[worker]:
            axes.fill_between(
                [begin_s, end_s], worker - 0.45, worker + 0.45, color=FATE_COLOURS[worker_stats.IDLE], linewidth=0
            )
        for number, fate in enumerate(FATES):
            label = fate if worker == 0 else None
            style = {"facecolor": FATE_COLOURS[fate], "hatch": FATE_HATCHES[fate], "edgecolor": "white"}
            low, high = (np.append(row, row[-1]) for row in (tops[number], tops[number + 1]))
            axes.fill_between(edges_s, low, high, label=label, linewidth=0, step="post", rasterized=True, **style)
    update_s = run.updates["time_s"]
    axes.plot(update_s, np.full(len(update_s), -0.75), "|", color="black", markersize=4, rasterized=True)
    axes.set(xlabel="seconds", ylabel="worker", xlim=(0, run.end_s or 1), ylim=(max(run.workers, 1) - 0.5, -1.0))
    figure.legend(loc="outside upper center", ncols=len(FATES))


def draw_round_trips(figure: Any, run: RunData) -> None:
    """Draw one box per worker: quartiles as box, 5 to 95 % as line, the longest time as ring.

    A triangle in place of the ring and a hollow box mark lower bounds of the times.
    """
    axes = _worker_axes(figure, run)
    for worker, row in enumerate(worker_stats.round_trips(run)):
        if row is None:
            continue
        least, lower, median, upper, most, longest = row.quantiles_s
        box = {"color": COLOURS[0], "alpha": 0.5} if row.known > UPPER_QUARTILE else {"color": "none"}
        end = ">" if row.known < len(row.quantiles_s) else "o"
        axes.plot([least, most], [worker, worker], color=COLOURS[0], linewidth=1)
        axes.barh(worker, upper - lower, left=lower, height=0.6, edgecolor=COLOURS[0], **box)
        axes.plot(median, worker, "|", color="black")
        axes.plot(longest, worker, end, markerfacecolor="none", color="black", markersize=4)
    axes.set(xlabel="round-trip time in seconds", ylabel="worker", ylim=(max(run.workers, 1) - 0.5, -0.5))
    axes.set_xlim(left=0)


def draw_heat_map(figure: Any, run: RunData) -> None:
    """Draw the mean compute time by worker and time."""
    axes = _worker_axes(figure, run)
    means = np.ma.masked_invalid(worker_stats.heat_map(run).mean_s)
    extent = (0, run.end_s or 1, max(run.workers, 1) - 0.5, -0.5)
    image = axes.imshow(means, aspect="auto", cmap="magma_r", extent=extent, interpolation="none")
    axes.set(xlabel="seconds", ylabel="worker")
    figure.colorbar(image, label="mean compute seconds")


def draw_staleness(figure: Any, run: RunData) -> None:
    """Draw a histogram of the staleness of the used gradients."""
    axes = figure.subplots()
    counts = worker_stats.staleness(run)
    axes.bar(counts["staleness"], counts["gradients"], color=COLOURS[0])
    axes.set(xlabel="staleness in versions", ylabel="used gradients")
    axes.set_xlim(-0.6, max([7, *counts["staleness"]]) + 0.6)  # keeps a single bar narrow
    axes.xaxis.get_major_locator().set_params(integer=True)


ONE_RUN: dict[str, Callable[..., None]] = {
    "timeline": draw_timeline,
    "first-updates": draw_tasks,
    "round-trips": draw_round_trips,
    "compute-time": draw_heat_map,
    "staleness": draw_staleness,
}


def _worker_axes(figure: Any, run: RunData) -> Any:
    """Return axes with a row per worker, some of which are numbered."""
    figure.set_size_inches(WIDTH_IN, 1.3 + max(1.5, 0.16 * run.workers))
    axes = figure.subplots()
    axes.set_yticks(range(0, max(run.workers, 1), 1 + run.workers // 24))
    return axes


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-")[:60]


def _plain(label: str) -> str:
    """Escape a label: matplotlib reads $ as mathematics and drops a leading underscore from the legend."""
    return label.replace("$", r"\$") if not label.startswith("_") else f" {label}"
