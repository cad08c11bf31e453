"""Draw docs/digits.svg: the same job under four protocols on the same simulated cluster."""

import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import paceline as pl

PROTOCOLS = ("bsp", "k_sync(k=12)", "k_batch_async(k=4)", "asp")
WINDOW = 64  # gradients in a mean loss


def main(target: Path, loss: float = 0.1) -> None:
    mpl.rcParams["svg.hashsalt"] = "paceline"  # the same picture is the same file
    job = replace(pl.jobs.digits(model="net", lr=1.0), lr_rule="proportional")
    cluster = pl.Cluster(16, timing=pl.timing.ShiftedExponential(shift_s=0.3, mean_s=0.7))
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for protocol in PROTOCOLS:
        result = pl.train(job, protocol=protocol, cluster=cluster, stop=pl.Stop(loss=loss))
        used = [record for record in result.history.of(pl.callbacks.GradientArrived) if record.used]
        smooth = np.convolve([record.loss for record in used], np.ones(WINDOW) / WINDOW, "valid")
        axes.plot([record.now_s for record in used[WINDOW - 1 :]], smooth, label=f"{protocol}: {result.time_s:.0f} s")
    axes.set(xlabel="virtual seconds", ylabel="training loss", yscale="log")
    axes.set_title("digits, 16 workers, 0.3 s + Exp(0.7 s) a gradient")
    axes.legend(title=f"time to loss {loss}")
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/digits.svg"))
