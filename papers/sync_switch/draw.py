"""Draw the figures that have results into figures/: `python -m papers.sync_switch.draw`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from papers.series import Runs, series_of
from papers.sync_switch.run import store
from papers.sync_switch.settings import FIGURES, RESULTS, Figure
from papers.sync_switch.training import lines_of

DRAWINGS = Path(__file__).parent / "figures"
CURVES = ("11",)  # figures of whole runs; the others show the ends of runs


def main(results: Path = RESULTS, folder: Path = DRAWINGS) -> None:
    mpl.rcParams["svg.hashsalt"] = "paceline"  # equal pictures give equal files
    folder.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        lines = store(name, results).lines()
        panels = {
            panel: series_of(found)
            for panel, case in figure.cases.items()
            if (found := lines_of(case.setup, case.series, lines))
        }
        if panels:
            drawing = curves(panels) if name in CURVES else bars(panels, figure)
            drawing.savefig(folder / f"figure{name}.svg", metadata={"Date": None})
            plt.close(drawing)


def bars(panels: Mapping[str, Mapping[str, Runs]], figure: Figure) -> Any:
    """Draw the ends of the runs of each series, one dot per seed: accuracy above, time below."""
    drawing, axes = plt.subplots(
        2, len(panels), figsize=(max(5, 3.6 * len(panels)), 5.2), layout="constrained", squeeze=False, sharex="col"
    )
    for column, (panel, by_series) in zip(axes.T, panels.items(), strict=True):
        for axis, what in zip(column, ("accuracy", "time_s"), strict=True):
            for i, runs in enumerate(by_series.values()):
                axis.plot([i] * len(runs), [line[what] for line in runs.values()], "o", color=f"C{i}", alpha=0.6)
        column[0].set(title=panel)
        column[1].set(ylim=(0, None))
        names = [name.replace(" >> ", "\n>> ") for name in by_series]
        column[1].set_xticks(range(len(names)), names, fontsize="x-small", rotation=45, ha="right")
    axes[0][0].set(ylabel="accuracy on the test data")
    axes[1][0].set(ylabel="virtual seconds")
    drawing.suptitle(figure.says)
    return drawing


def curves(panels: Mapping[str, Mapping[str, Runs]]) -> Any:
    """Draw Fig. 11 for the first seed: training loss against workload, accuracy against time."""
    drawing, axes = plt.subplots(len(panels), 2, figsize=(10, 3.6 * len(panels)), layout="constrained", squeeze=False)
    for (left, right), (panel, by_series) in zip(axes, panels.items(), strict=True):
        for i, (name, runs) in enumerate(by_series.items()):
            line = runs[min(runs)]
            losses = np.array(line["train_loss"], dtype=float)
            left.plot(line["train_workload"], losses, color=f"C{i}", linewidth=0.8, label=name)
            right.plot(line["test_s"], np.array(line["test_accuracy"], dtype=float), color=f"C{i}", label=name)
        left.set(title=panel, xlabel="gradients", ylabel="training loss", yscale="log")
        right.set(xlabel="virtual seconds", ylabel="accuracy on the test data")
        right.legend(fontsize="x-small")
    return drawing


if __name__ == "__main__":
    main()
