"""Draw the figures that have results into papers/dbw/figures: `python -m papers.dbw.draw`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from papers.dbw.settings import RESULTS
from papers.series import series_of
from papers.store import Line, Store

FIGURES = Path(__file__).parent / "figures"


def main(results: Path = RESULTS, folder: Path = FIGURES) -> None:
    mpl.rcParams["svg.hashsalt"] = "paceline"  # equal pictures give equal files
    folder.mkdir(exist_ok=True)
    drawings = {"1": estimates, "3": durations, "4": choices, "6": times, "9": slowdown}
    for figure, draw in drawings.items():
        if lines := Store(results / f"figure{figure}.jsonl").lines():
            drawing = draw(sorted(lines, key=lambda line: line["asked"]["seed"]))
            drawing.savefig(folder / f"figure{figure}.svg", metadata={"Date": None})
            plt.close(drawing)


def estimates(lines: Sequence[Line]) -> Any:
    """Draw Fig. 1 or 2: estimates as lines, true values dashed."""
    drawing, axes = plt.subplots(1, 3, figsize=(10, 2.8), layout="constrained")
    line = lines[0]
    pairs = (("squared_norm", "squared_norm"), ("variance", "variance"), ("gain", "decrease"))
    titles = ("squared norm of the gradient", "variance of a gradient", "gain, and decrease of the loss")
    for axis, (ours, theirs), title in zip(axes, pairs, titles, strict=True):
        axis.plot(np.array(line["estimated"][ours], dtype=float), label="estimate")
        axis.plot(np.array(line["true"][theirs], dtype=float), "--", label="truth")
        axis.set(title=title, xlabel="update")
    axes[0].legend()
    return drawing


def durations(lines: Sequence[Line]) -> Any:
    """Draw Fig. 3: both estimates of E[T_kk] over the updates, and the true value."""
    drawing, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained", sharey=True)
    for axis, which in zip(axes, ("estimated", "naive"), strict=True):
        for k, (column, truth_s) in enumerate(
            zip(np.array(lines[0][f"{which}_s"], dtype=float).T, lines[0]["truth_s"], strict=True), start=1
        ):
            (curve,) = axis.plot(column, label=f"k={k}")
            axis.axhline(truth_s, linestyle="--", color=curve.get_color(), linewidth=0.8)
        axis.set(title=which, xlabel="update")
    axes[0].set(ylabel="seconds")
    axes[0].legend(ncols=2, fontsize="small")
    return drawing


def choices(lines: Sequence[Line]) -> Any:
    """Draw Fig. 4: the loss of the probe over time, and k over the updates."""
    drawing, (above, below) = plt.subplots(2, 1, figsize=(7, 4.5), layout="constrained")
    longest = max(lines, key=lambda line: line["updates"])["asked"]["case"]
    for name, runs in series_of([line for line in lines if line["asked"]["case"] == longest]).items():
        line = runs[min(runs)]
        (curve,) = above.plot(line["probe_s"], line["probe_loss"], label=name)
        below.plot(np.arange(len(line["k"])), line["k"], color=curve.get_color(), linewidth=0.8)
    above.set(xlabel="virtual seconds", ylabel="loss of the probe", yscale="log")
    below.set(xlabel="update", ylabel="k")
    above.legend()
    return drawing


def times(lines: Sequence[Line]) -> Any:
    """Draw Fig. 6: the seconds to the target, one dot per seed."""
    cases = sorted({line["asked"]["case"] for line in lines})
    drawing, axes = plt.subplots(1, len(cases), figsize=(4 * len(cases), 3.4), layout="constrained", squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        by_series = series_of([line for line in lines if line["asked"]["case"] == case])
        by_series = dict(sorted(by_series.items(), key=lambda each: -mean(line["time_s"] for line in each[1].values())))
        for row, runs in enumerate(by_series.values()):
            axis.plot([line["time_s"] for line in runs.values()], [row] * len(runs), "o", alpha=0.6)
        axis.set_yticks(range(len(by_series)), list(by_series), fontsize="small")
        axis.set(title=case, xlabel="virtual seconds to the target", xlim=(0, None))
    return drawing


def slowdown(lines: Sequence[Line]) -> Any:
    """Draw Fig. 9: k over the updates, one line per seed."""
    cases = sorted({line["asked"]["case"] for line in lines})
    drawing, axes = plt.subplots(1, len(cases), figsize=(11, 2.8), layout="constrained", squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        by_series = series_of([line for line in lines if line["asked"]["case"] == case])
        for i, name in enumerate(sorted(by_series)):
            runs = by_series[name]
            for line in runs.values():
                axis.plot(line["k"], color=f"C{i}", alpha=0.6, label=name if line is runs[min(runs)] else None)
        axis.set(title=f"slower {case}", xlabel="update", ylabel="k")
        axis.legend()
    return drawing


if __name__ == "__main__":
    main()
