"""Curves of loss, metrics and quorum against time, updates and workload: mean and band over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.report.run_data import Column, RunData

AXES = {"time": "seconds", "updates": "updates", "workload": "workload (accepted gradients)"}
RATES = {"scale": "learning rate, as a factor on the given one", "phi": "phi, gradients at which noise limits the rate"}
SWITCHES = ("protocol", "resumed")  # kinds of marks drawn as vertical lines
GRID = 240  # points of a mean curve
MOST_POINTS = 2_000  # points of the curve of a single run; a longer one is drawn on the grid


@dataclass(frozen=True, kw_only=True)
class CurveLine:
    """Mean curve with the smallest and largest value over its runs.

    Attributes:
        steps: whether a value holds from the previous point to its own.
    """

    x: Column
    mean: Column
    low: Column
    high: Column
    steps: bool = False


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed.

    Attributes:
        label: name of the group in the report.
        runs: data of the runs.
        lines: curves by axis and panel, for each panel that the runs have.
    """

    label: str
    runs: list[RunData]
    lines: dict[str, dict[str, CurveLine]] = field(default_factory=dict)


def groups(runs: Sequence[RunData]) -> list[Group]:
    """Group the runs by protocol and cluster, and compute their curves."""
    found: dict[tuple[str, Any], list[RunData]] = {}
    for run in runs:
        found.setdefault((run.protocol, run.run.configuration.get("cluster")), []).append(run)
    labels = [protocol for protocol, _ in found]
    return [
        Group(
            protocol if labels.count(protocol) == 1 else f"{protocol} on {cluster}",
            members,
            {axis: _panels(members, axis) for axis in AXES},
        )
        for (protocol, cluster), members in found.items()
    ]


def panels(groups: Sequence[Group]) -> dict[str, str]:
    """Return the panels of these groups with their titles: training loss, each metric, learning rate, quorum.

    Metrics with a target come first, the evaluation loss comes last.
    """
    runs = [run for group in groups for run in group.runs]
    asked = [target.metric for run in runs for target in run.evaluated]
    names = dict.fromkeys([*asked, *(name for run in runs for name in _metrics(run))])
    order = sorted(names, key=lambda name: (name not in asked, name == "loss"))
    metrics = {metric_panel(name): metric_title(name) for name in order}
    rates = RATES if any(len(run.rates["phi"]) for run in runs) else {}
    return {"loss": "training loss", **metrics, **rates, "k": "quorum k"}


def metric_panel(name: str) -> str:
    """Return the unique name of the panel of a metric."""
    return name if name == "accuracy" else f"metric {name}"


def metric_title(name: str) -> str:
    """Return the title of a metric."""
    return "evaluation loss" if name == "loss" else name


def smooth_loss(run: RunData) -> Column:
    """Return the mean loss of the last gradients at each update, over the window of `Stop(loss=)`.

    Losses that are not finite are left out; without a finite loss the mean is nan.
    """
    return mean_of_last(run.losses, run.updates["gradients"], run.loss_window)


def mean_of_last(losses: Column, ends: Column, window: int) -> Column:
    """Return the mean of the finite ones of the last losses before each end, nan without one.

    Args:
        losses: losses in the order of their arrival.
        ends: number of losses before each end.
        window: number of losses in a mean.
    """
    known = np.isfinite(losses)
    sums = np.append(0.0, np.cumsum(np.where(known, losses, 0.0)))
    counts = np.append(0, np.cumsum(known))
    first = np.maximum(ends - window, 0)
    with np.errstate(invalid="ignore"):
        mean: Column = (sums[ends] - sums[first]) / (counts[ends] - counts[first])
    return mean


def band(lines: Sequence[tuple[Column, Column]], steps: bool = False) -> CurveLine | None:
    """Return mean, minimum and maximum of some curves on the range of x that all of them have.

    Args:
        lines: pairs of x, in ascending order, and y; points that are not finite are left out.
        steps: whether y holds from the previous point to its own; otherwise it is linear between points.

    Returns:
        the mean curve, None if the curves have no common range.
    """
    finite = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in lines]
    if not all(len(x) for x, _ in finite):
        return None
    if len(finite) == 1 and len(finite[0][0]) <= MOST_POINTS:
        x, y = finite[0]
        return CurveLine(x=x, mean=y, low=y, high=y, steps=steps)
    begin, end = max(x[0] for x, _ in finite), min(x[-1] for x, _ in finite)
    if begin > end:
        return None
    grid = np.linspace(begin, end, GRID)
    values = np.array([_on_grid(x, y, grid) for x, y in finite])
    return CurveLine(x=grid, mean=values.mean(axis=0), low=values.min(axis=0), high=values.max(axis=0))


def switches(run: RunData) -> list[dict[str, Any]]:
    """Return the place of each protocol switch and resumption on each axis, with the reason."""
    workload = np.append(0, run.updates["workload"])
    return [
        {"time": mark.time_s, "updates": mark.updates, "workload": int(workload[mark.updates]), "reason": mark.reason}
        for mark in [mark for mark in run.marks if mark.kind in SWITCHES][1:]  # the first one is the start of the run
    ]


def _on_grid(x: Column, y: Column, grid: Column) -> Column:
    """Return means of y around the grid points; interpolate where the points are sparser than the grid."""
    if len(x) < 2 * len(grid) or grid[0] == grid[-1]:
        return np.interp(grid, x, y)
    edges = np.append(grid, grid[-1]) - (grid[1] - grid[0]) / 2
    edges[0], edges[-1] = grid[0], grid[-1]
    area = np.interp(edges, x, np.append(0.0, np.cumsum(y[1:] * np.diff(x))))
    means: Column = np.diff(area) / np.diff(edges)
    return means


def _panels(runs: Sequence[RunData], axis: str) -> dict[str, CurveLine]:
    names = dict.fromkeys(name for run in runs for name in _metrics(run))
    lines = {
        "loss": band([(_x(run, axis), smooth_loss(run)) for run in runs]),
        **{metric_panel(name): band([_metric(run, name, axis) for run in runs]) for name in names},
        **{name: band([_rate(run, name, axis) for run in runs], steps=True) for name in RATES},
    }
    if runs[0].shares is None:  # else each update has a gradient of every rank
        lines["k"] = band([(_x(run, axis), run.updates["k"].astype(float)) for run in runs], steps=True)
    return {name: line for name, line in lines.items() if line is not None}


def _x(run: RunData, axis: str) -> Column:
    if axis == "updates":
        return np.arange(1.0, len(run.updates["k"]) + 1)
    return run.updates["time_s" if axis == "time" else "workload"].astype(float)


def _rate(run: RunData, name: str, axis: str) -> tuple[Column, Column]:
    if not len(run.rates[name]):
        return np.zeros(0), np.zeros(0)
    values = np.append(run.rates[name], run.rates[name][-1])  # the last one holds to the end of the run
    if axis == "time":
        return np.append(run.rates["time_s"], run.end_s), values
    updates = np.append(run.rates["updates"], len(run.updates["k"]))
    x = updates if axis == "updates" else np.append(0, run.updates["workload"])[updates]
    return x.astype(float), values


def _metrics(run: RunData) -> list[str]:
    return list(dict.fromkeys(name for evaluation in run.evaluations for name in evaluation.metrics))


def _metric(run: RunData, name: str, axis: str) -> tuple[Column, Column]:
    measured = [evaluation for evaluation in run.evaluations if name in evaluation.metrics]
    values = np.array([evaluation.metrics[name] for evaluation in measured], dtype=float)
    if axis == "time":
        return np.array([evaluation.published_s for evaluation in measured], dtype=float), values
    updates = np.array([evaluation.version for evaluation in measured], dtype=int)
    if axis == "updates":
        return updates.astype(float), values
    return np.append(0.0, run.updates["workload"])[np.minimum(updates, len(run.updates["k"]))], values
