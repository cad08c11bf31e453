"""Draw the figures that have results into figures/: `python -m papers.slow_and_stale.draw`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from papers.series import Runs, series_of
from papers.slow_and_stale.run import store
from papers.slow_and_stale.settings import FIGURES, RESULTS, TIMES, Figure
from papers.slow_and_stale.training import lines_of
from papers.store import Line

DRAWINGS = Path(__file__).parent / "figures"


def main(results: Path = RESULTS, folder: Path = DRAWINGS) -> None:
    mpl.rcParams["svg.hashsalt"] = "paceline"  # equal pictures give equal files
    folder.mkdir(exist_ok=True)
    drawings = {"5": speed_up, "6": runtime, "7": bounds}
    for name, draw in drawings.items():
        if lines := store(name, results).lines():
            _save(draw(lines), folder / f"figure{name}.svg")
    for name, figure in FIGURES.items():
        lines = store(name, results).lines()
        panels = {panel: series_of(found) for panel, case in figure.cases.items() if (found := lines_of(case, lines))}
        if panels:
            _save(trained(panels, figure), folder / f"figure{name}.svg")


def _save(drawing: Any, path: Path) -> None:
    drawing.savefig(path, metadata={"Date": None})
    plt.close(drawing)


def speed_up(lines: Sequence[Line]) -> Any:
    """Draw Fig. 5: theory as lines, simulations as dots."""
    drawing, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for i, law in enumerate(TIMES["5"].laws):
        by_series = series_of([line for line in lines if line["asked"]["law"] == law])
        first = next(iter(by_series["sync"].values()))
        workers = first["asked"]["workers"]
        ratio = {
            which: np.log(
                [
                    np.array(by_series["sync"][seed][which]) / np.array(by_series["async"][seed][which])
                    for seed in by_series["sync"].keys() & by_series["async"].keys()
                ]
            )
            for which in ("theory_s", "simulated_s")
        }
        axes.plot(workers, ratio["theory_s"][0], color=f"C{i}", label=law)
        axes.plot(workers, ratio["simulated_s"].T, ".", color=f"C{i}")
    axes.set(xlabel="P", ylabel="log E[T sync] / E[T async]", title="lines: theory; dots: simulation, a seed each")
    axes.legend()
    return drawing


def runtime(lines: Sequence[Line]) -> Any:
    """Draw Fig. 6: simulations as dots, theory as lines, or as a band where it has only bounds."""
    laws = TIMES["6"].laws
    drawing, axes = plt.subplots(1, len(laws), figsize=(9, 3.4), layout="constrained")
    for axis, law in zip(axes, laws, strict=True):
        by_series = series_of([line for line in lines if line["asked"]["law"] == law])
        for i, (name, runs) in enumerate(by_series.items()):
            line = next(iter(runs.values()))
            ks, updates = line["asked"]["k"], line["asked"]["updates"]
            simulated = np.array([each["simulated_s"] for each in runs.values()]) * updates
            axis.plot(ks, simulated.mean(axis=0), "o-", markersize=3, color=f"C{i}", label=name)
            lower, upper = (np.array(line[bound]) * updates for bound in ("lower_s", "upper_s"))
            axis.fill_between(ks, lower, upper, color=f"C{i}", alpha=0.15, linewidth=0)
        axis.set(title=law, xlabel="K", ylabel="seconds")
    axes[0].legend(title="band: between bounds", fontsize="small")
    return drawing


def bounds(lines: Sequence[Line]) -> Any:
    """Draw Fig. 7."""
    drawing, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for name, errors in lines[0]["errors"].items():
        axes.plot(lines[0]["times_s"], errors, label=name)
    axes.set(xlabel="seconds", ylabel="bound on the error", yscale="log")
    axes.legend()
    return drawing


def trained(panels: Mapping[str, Mapping[str, Runs]], figure: Figure) -> Any:
    """Draw Fig. 8 to 14: the loss of the probe, one line per seed."""
    drawing, axes = plt.subplots(
        1, len(panels), figsize=(max(6, 4.2 * len(panels)), 3.6), layout="constrained", squeeze=False
    )
    for axis, (panel, by_series) in zip(axes[0], panels.items(), strict=True):
        for i, (name, runs) in enumerate(by_series.items()):
            for line in runs.values():
                where = line["probe_s" if figure.against == "seconds" else "probe_version"]
                label = name if line is next(iter(runs.values())) else None
                axis.plot(where, line[f"probe_{figure.shows}"], color=f"C{i}", alpha=0.6, linewidth=0.8, label=label)
        axis.set(title=panel, xlabel="virtual seconds" if figure.against == "seconds" else "updates")
        axis.set(ylabel=f"{figure.shows} of the probe", xlim=(0, _shortest(by_series, figure)))
        lowest, highest = axis.get_ylim()
        if highest > 20 * lowest > 0:
            axis.set(yscale="log")
        axis.legend(fontsize="x-small")
    return drawing


def _shortest(by_series: Mapping[str, Runs], figure: Figure) -> float:
    """Return the median length of the curves."""
    column = "time_s" if figure.against == "seconds" else "updates"
    return float(np.median([line[column] for runs in by_series.values() for line in runs.values()]))


if __name__ == "__main__":
    main()
