"""Train handwritten digits on four real processes, one of them slow, with three protocols."""

from pathlib import Path
from shutil import rmtree

from rich.console import Console

import paceline as pl
from paceline.experiments.runner.progress import ProgressBars
from paceline.report import write_report

RUNS = Path("runs/demo")
HEALTHY = pl.timing.Deterministic(0.001)
STRAGGLER = pl.timing.ShiftedExponential(shift_s=0.03, mean_s=0.03)


def main(runs: Path = RUNS, loss: float = 0.2) -> None:
    rmtree(runs, ignore_errors=True)  # otherwise finished runs would not be repeated
    slowness = pl.Cluster(4, timing=[HEALTHY, HEALTHY, HEALTHY, STRAGGLER])
    console = Console()
    with ProgressBars(console) as display:
        comparison = pl.compare(
            pl.jobs.digits(),
            protocols=[pl.bsp(), pl.k_sync(k=3), pl.asp()],
            cluster=pl.LocalCluster(4, slowness=slowness),
            stop=pl.Stop(loss=loss, seconds=25),
            seeds=1,
            out=runs,
            display=display,
        )
    console.print()
    console.print(comparison.table())
    console.print()
    console.print(f"The table and a folder for each run (run.json, events.jsonl, the model) are in {runs}.")
    console.print(f"To look at them, open {write_report([runs])} in a browser.")


if __name__ == "__main__":
    main()
