"""Draw figures/overview.svg, and a figure for each pattern: `python -m papers.ddp.draw`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from papers.ddp.outcomes import Outcomes, all_lines, loss_difference, shown, speed_up
from papers.ddp.settings import AUTO, BALANCED, CONTENDERS, DDP, QUEUE, RESULTS, SHOWN, WITHOUT_SLOW

FIGURES = Path(__file__).parent / "figures"
OVERVIEW = (WITHOUT_SLOW, BALANCED, QUEUE, "k_sync(k=n-1)", AUTO)


def main(results: Path = RESULTS, folder: Path = FIGURES) -> None:
    mpl.rcParams["svg.hashsalt"] = "paceline"  # equal pictures give equal files
    folder.mkdir(exist_ok=True)
    found = {each.pattern: runs for each, runs in shown(all_lines(results)).items() if (each.job, each.n) == SHOWN}
    for name, drawing in {"overview": overview(found), **{each: one(found[each]) for each in found}}.items():
        drawing.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(drawing)


def overview(found: Mapping[str, Outcomes]) -> Any:
    """Draw how many times faster than DDP some contenders reach its final loss, for each pattern."""
    drawing, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for i, name in enumerate(OVERVIEW):
        for place, runs in enumerate(found.values()):
            if faster := speed_up(runs[name], runs[DDP]):
                error = [[faster.estimate - faster.low], [faster.high - faster.estimate]]
                label = name if place == 0 else None
                axes.bar(place + 0.16 * (i - 2), faster.estimate, 0.15, yerr=error, color=f"C{i}", label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xticks=range(len(found)), xticklabels=list(found), ylabel="times faster than DDP")
    axes.legend()
    return drawing


def one(runs: Outcomes) -> Any:
    """Draw speed and final loss of every contender under a pattern, each with its 95 % interval."""
    names = [name for name in CONTENDERS if runs.get(name) and name != DDP][::-1]
    drawing, axes = plt.subplots(1, 2, figsize=(9, 0.3 * len(names) + 1), layout="constrained", sharey=True)
    for row, name in enumerate(names):
        for axis, measure in zip(axes, (speed_up, loss_difference), strict=True):
            if interval := measure(runs[name], runs[DDP]):
                axis.plot([interval.low, interval.high], [row, row], color="C0")
                axis.plot(interval.estimate, row, "o", color="C0")
            else:
                middle = {"transform": axis.get_yaxis_transform(), "ha": "center", "va": "center"}
                axis.text(0.5, row, "target not reached by every seed", color="grey", **middle)
    axes[0].set(xlabel="times faster than DDP to its final loss + 0.02", yticks=range(len(names)), yticklabels=names)
    axes[0].set_xscale("log", base=2)
    axes[0].xaxis.set_major_formatter("{x:g}")
    axes[0].axvline(1, color="black", linewidth=0.8)
    axes[1].set(xlabel="final validation loss - DDP's (nats)")
    axes[1].axvline(0, color="black", linewidth=0.8)
    return drawing


if __name__ == "__main__":
    main()
