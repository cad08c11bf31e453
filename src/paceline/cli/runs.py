"""`paceline report`, `trace`, `replay` and `advise`: what can be done with a run that is written down."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.flags import RECORDING, in_flags
from paceline.cli.options import Format, Output
from paceline.errors import RunError, UsageError
from paceline.utils.wording import counted


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs of one job, or folders above them.")],
    out: Annotated[Path | None, typer.Option(help="The file; report.html in the folder, if it is only one.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for every figure as PNG and SVG.")] = None,
) -> None:
    """Show runs on one page that opens in a browser, without any network."""
    from paceline.report import write_report

    print(write_report(runs, out, figures))


def trace(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("trace.csv"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier file there.")] = False,
) -> None:
    """Extract the round trips of a run, to replay them with --cluster trace:FILE."""
    from paceline.clusters.timing import Trace
    from paceline.recording.run_folder import SavedRun
    from paceline.recording.validation import believed

    if os.path.lexists(out) and not overwrite:
        raise UsageError(f"{out} exists already; give another file, or --overwrite")
    with believed(run):
        recorded = Trace.of(SavedRun(run), source=str(run))
    recorded.to_csv(out)
    censored = f"{recorded.censored_rows} of them censored"
    print(f"{out}: {counted(len(recorded.rows), 'round trip')} of {counted(recorded.workers, 'worker')}, {censored}")


def replay(run: Annotated[Path, typer.Argument(help="Folder of the run.")]) -> None:
    """Feed a run's own arrivals to the coordinator again and say whether it decides the same."""
    from paceline import replay as feed

    found = feed(run)
    if not found.is_same:
        raise RunError(f"{run}: not the same {found.difference}")
    print(f"{counted(found.updates, 'update')}, {counted(found.decisions, 'decision')}: all the same.")


def advise(
    run: Annotated[Path, typer.Argument(help="Folder of a run with --measure-steps, or the CSV file of a trace.")],
    protocols: Annotated[str | None, typer.Option(help="As 'bsp, k_sync(k=4), asp'; the papers' if left out.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Whose times to take instead: trace:FILE, '16*exp(mean=1)'.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the simulations.")] = 0,
    output: Output = Format.TEXT,
) -> None:
    """Rank protocols and values of K by what a run's own gradients and times let expect."""
    from paceline import advise as rank
    from paceline.utils.spec_parser import split_top

    wanted = [each.strip() for each in split_top(protocols, ",")] if protocols is not None else []
    advice = rank(run, protocols=wanted, cluster=cluster, seed=seed)
    print(json.dumps(advice.as_json(), allow_nan=False) if output is Format.JSON else in_flags(str(advice), RECORDING))
