"""Draw figures/: validation loss against time and bytes: `python -m papers.diloco.draw`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from paceline.jobs.job import trainable
from paceline.worker.torch_utils import build_model
from papers.diloco.run import runs_of
from papers.diloco.settings import CASES, RESULTS, Case
from papers.gpt import gpt
from papers.series import Runs

FIGURES = Path(__file__).parent / "figures"


def main(results: Path = RESULTS, folder: Path = FIGURES) -> None:
    mpl.rcParams["svg.hashsalt"] = "paceline"  # equal pictures give equal files
    folder.mkdir(exist_ok=True)
    vector_mb = sum(each.nbytes for each in trainable(build_model(gpt(Path()), seed=0))) / 1e6
    for name, case in CASES.items():
        if runs := runs_of(name, results):
            drawing = losses(runs, case, vector_mb)
            drawing.savefig(folder / f"{name.replace(', ', '-').replace(' ', '-')}.svg", metadata={"Date": None})
            plt.close(drawing)


def losses(series: Mapping[str, Runs], case: Case, vector_mb: float) -> Any:
    """Draw the loss of every seed against virtual time and bytes, which are those of gradients and versions.

    Args:
        series: runs of each protocol.
        case: case of the runs.
        vector_mb: megabytes of the parameters.
    """
    drawing, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for i, (name, runs) in enumerate(series.items()):
        for number, line in enumerate(runs.values()):
            shares = np.arange(1, len(line["loss"]) + 1) / len(line["loss"])
            sent_mb = 2 * vector_mb * line["pushes"] / case.cluster.n * shares
            for axis, positions in zip(axes, (line["at_s"], sent_mb), strict=True):
                axis.plot(positions, line["loss"], color=f"C{i}", linewidth=1, label=None if number else name)
    axes[0].set(xlabel="virtual seconds", ylabel="validation loss (nats)")
    axes[1].set(xlabel="megabytes of a worker, both directions", xscale="log")
    axes[0].legend(fontsize="x-small")
    return drawing


if __name__ == "__main__":
    main()
