"""Draw the figures that have results into figures/: `python -m papers.dc_s3gd.draw`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from papers.dc_s3gd.run import store
from papers.dc_s3gd.settings import COMPENSATED, FIGURES, ITERATIONS, RESULTS, STRAGGLERS, Figure
from papers.dc_s3gd.table import MEASURED, at_n
from papers.dc_s3gd.training import runs_of
from papers.series import Runs, series_of
from papers.store import Line, Store

DRAWINGS = Path(__file__).parent / "figures"
CURVES = "table1"  # also drawn run by run, as in Fig. 1
Panels = Mapping[str, Mapping[str, Runs]]


def main(results: Path = RESULTS, folder: Path = DRAWINGS) -> None:
    mpl.rcParams["svg.hashsalt"] = "paceline"  # equal pictures give equal files
    folder.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        panels = {panel: runs_of(case, store(name, results).lines()) for panel, case in figure.cases.items()}
        panels = {panel: by_series for panel, by_series in panels.items() if any(by_series.values())}
        if panels:
            _save(accuracies(panels, figure), folder / f"{name}.svg")
        if panels and name == CURVES:
            _save(curves(panels, figure), folder / f"{name}-curves.svg")
    if lines := store("iterations", results).lines():
        _save(iterations(lines, Store(results / MEASURED).lines()), folder / "iterations.svg")
    if lines := store("stragglers", results).lines():
        _save(stragglers(lines), folder / "stragglers.svg")


def _save(drawing: Any, path: Path) -> None:
    drawing.savefig(path, metadata={"Date": None})
    plt.close(drawing)


def accuracies(panels: Panels, figure: Figure) -> Any:
    """Draw the final accuracies of each case, one dot per seed."""
    drawing, axes = plt.subplots(figsize=(max(4.5, 1.1 * len(panels) + 2), 4.2), layout="constrained")
    names = list(next(iter(panels.values())))
    for i, name in enumerate(names):
        offset = (i - (len(names) - 1) / 2) * 0.8 / len(names)
        dots = [
            (x + offset, line["accuracy"]) for x, each in enumerate(panels.values()) for line in each[name].values()
        ]
        axes.plot(*zip(*dots, strict=True), "o", color=f"C{i}", alpha=0.6, label=name)
    axes.set(ylabel="accuracy on the test data", title=figure.says)
    axes.set_xticks(range(len(panels)), [panel.replace(", ", "\n") for panel in panels], fontsize="x-small")
    axes.legend(fontsize="x-small")
    return drawing


def curves(panels: Panels, figure: Figure) -> Any:
    """Draw Fig. 1: the test error of the first seed."""
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    drawing, axes = plt.subplots(
        rows, columns, figsize=(3 * columns, 2.4 * rows), layout="constrained", squeeze=False, sharex=True
    )
    for axis, (panel, by_series) in zip(axes.flat, panels.items(), strict=False):
        epochs = figure.cases[panel].setup.epochs
        for i, (name, runs) in enumerate(by_series.items()):
            if runs:
                line = runs[min(runs)]
                at = epochs * np.array(line["test_update"]) / line["made"]
                axis.plot(at, 1 - np.array(line["test_accuracy"], dtype=float), color=f"C{i}", label=name)
        axis.set(title=panel, yscale="log")
        axis.title.set_fontsize("small")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    drawing.supxlabel("epochs")
    drawing.supylabel("error on the test data")
    axes[0][0].legend(fontsize="x-small")
    return drawing


def iterations(lines: Sequence[Line], measured: Sequence[Line]) -> Any:
    """Draw eq. (13) to (15) as lines, simulations of 16 workers as dots, and measurements as crosses."""
    drawing, axes = plt.subplots(figsize=(5.5, 3.8), layout="constrained")
    ratios = np.array(ITERATIONS.all_reduce_s)
    for i, line in enumerate(lines):
        name = line["asked"]["series"]
        axes.plot(ratios, at_n(line, "predicted_s", 16), color=f"C{i}", label=name)
        axes.plot(ratios, at_n(line, "simulated_s", 16), "o", color=f"C{i}", markersize=4)
        there = [each for each in measured if each["asked"]["series"] == name]
        for each in there:
            compute_s, all_reduce_s = each["asked"]["compute_s"], each["asked"]["all_reduce_s"]
            seconds = np.array(each["iteration_s"]) / compute_s
            axes.plot([all_reduce_s / compute_s] * len(seconds), seconds, "x", color=f"C{i}")
    axes.set(
        xlabel="seconds of an all-reduce / seconds of a gradient",
        ylabel="seconds of an iteration / of a gradient",
        title="lines: eq. (13) to (15); dots: simulated; crosses: measured",
    )
    axes.title.set_fontsize("small")
    axes.legend(fontsize="x-small")
    return drawing


def stragglers(lines: Sequence[Line]) -> Any:
    """Draw the seconds per N gradients against N, one panel per cluster."""
    drawing, axes = plt.subplots(2, 3, figsize=(9.5, 5), layout="constrained", sharex=True)
    for axis, cluster in zip(axes.flat, STRAGGLERS.clusters, strict=True):
        by_series = series_of([line for line in lines if line["asked"]["law"] == cluster])
        for i, (name, runs) in enumerate(by_series.items()):
            seconds = np.mean([line["seconds"] for line in runs.values()], axis=0)
            style = {"linewidth": 2.5} if name == COMPENSATED else {}
            axis.plot(STRAGGLERS.workers, seconds, "o-", color=f"C{i}", label=name.format(most="3N/4"), **style)
        axis.set(xscale="log", title=cluster, ylim=(0, None))
        axis.set_xticks(STRAGGLERS.workers, [str(n) for n in STRAGGLERS.workers])
        axis.minorticks_off()
        axis.title.set_fontsize("x-small")
    drawing.supxlabel("N")
    drawing.supylabel("seconds in which N gradients are used")
    axes.flat[0].legend(fontsize="x-small")
    return drawing


if __name__ == "__main__":
    main()
