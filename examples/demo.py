"""Train handwritten digits on four real processes, one of them slow, with three protocols."""

from pathlib import Path

from rich.console import Console

import paceline as pl
from paceline.progress import ProgressLine
from paceline.report import write_report
from paceline.summary import comparison, verdict

RUNS = Path("runs/demo")
HEALTHY = pl.Deterministic(0.001)
STRAGGLER = pl.ShiftedExponential(shift_s=0.03, mean_s=0.03)


def main(runs: Path = RUNS, loss: float = 0.2) -> None:
    slowness = pl.Cluster(4, timing=[HEALTHY, HEALTHY, HEALTHY, STRAGGLER])
    cluster = pl.LocalCluster(4, slowness=slowness)
    stop = pl.Stop(loss=loss, seconds=25)
    console = Console()
    results = {}
    for protocol in (pl.bsp(), pl.k_sync(k=3), pl.asp()):
        with ProgressLine(protocol.name, stop, console) as progress:
            results[protocol.name] = pl.train(
                pl.jobs.digits(),
                protocol=protocol,
                cluster=cluster,
                stop=stop,
                out=runs / protocol.name,
                overwrite=True,
                callbacks=[progress],
            )
    console.print()
    console.print(comparison(results))
    console.print()
    console.print(f"Each run is in a folder of {runs}/: run.json, events.jsonl, the model.")
    page = write_report([runs / name for name in results], out=runs / "report.html")
    console.print(f"To see them side by side, open {page} in a browser.")
    console.print(verdict(results), style="bold")


if __name__ == "__main__":
    main()
