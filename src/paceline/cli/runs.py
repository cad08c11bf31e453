"""`paceline report`, `trace`, `replay` and `advise`: commands on recorded runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.flags import RECORDING, in_flags
from paceline.cli.options import Format, Output, Overwrite, check_out
from paceline.errors import RunError, UsageError
from paceline.utils.wording import counted

if TYPE_CHECKING:
    from paceline.experiments.advise.recording_advice import RecordingAdvice
    from paceline.experiments.advise.result import Advice


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs of one job, or their parent folders, or a recording.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write. Default: report.html, in the folder if only one is given.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder to write each figure to, as PNG and SVG.")] = None,
) -> None:
    """Write an HTML report of runs: one file that opens offline in a browser."""
    from paceline.report import write_report

    print(write_report(runs, out, figures))


def trace(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of a recording.")],
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("trace.csv"),
    overwrite: Overwrite = False,
) -> None:
    """Export the round-trip times of a run, to simulate them with --cluster trace:FILE."""
    from paceline.clusters.timing.trace import Trace
    from paceline.ddp_recording.as_trace import read_trace_of
    from paceline.ddp_recording.recording import is_recording
    from paceline.recording.run_folder import SavedRun
    from paceline.recording.validation import believed

    check_out(out, overwrite)
    if is_recording(run):
        recorded = read_trace_of(run)
    else:
        with believed(run):
            recorded = Trace.of(SavedRun(run), source=str(run))
    recorded.to_csv(out)
    censored = f"{recorded.censored_rows} of them censored"
    print(f"{out}: {counted(len(recorded.rows), 'round trip')} of {counted(recorded.workers, 'worker')}, {censored}")


def replay(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    output: Output = Format.TEXT,
) -> None:
    """Replay the logged events of a run and check that every decision is reproduced."""
    from paceline import replay as feed

    found = feed(run)
    if output is Format.JSON:
        print(json.dumps(asdict(found)))
    if not found.is_same:
        raise RunError(f"{run}: the replay differs {found.difference}")
    if output is Format.TEXT:
        print(f"{counted(found.updates, 'update')}, {counted(found.decisions, 'decision')}: all reproduced.")


def advise(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run with --measure-steps, or of a recording, or CSV file of a trace.")
    ],
    protocols: Annotated[
        str | None,
        typer.Option(help="Protocols to rank, for example 'bsp, k_sync(k=4), asp'. Default: all of the catalogue."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Source of other round-trip times: trace:FILE or '16*exp(mean=1)'.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Price of one worker-hour, for the cost of waiting in a recording.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulations.")] = 0,
    output: Output = Format.TEXT,
) -> None:
    """Rank protocols and quorums K by the training time expected from a run's gradients and times."""
    from paceline import advise as rank
    from paceline import advise_recording
    from paceline.ddp_recording.recording import is_recording
    from paceline.utils.spec_parser import split_top

    wanted = [each.strip() for each in split_top(protocols, ",")] if protocols is not None else []
    if is_recording(run):
        if cluster is not None:
            raise UsageError("cluster= does not apply to a recording, which has its own times; omit it")
        advice: Advice | RecordingAdvice = advise_recording(run, protocols=wanted, price=price, seed=seed)
    elif price is not None:
        raise UsageError("price= applies to the folder of a recording, which paceline record writes; omit it")
    else:
        advice = rank(run, protocols=wanted, cluster=cluster, seed=seed)
    print(json.dumps(advice.as_json(), allow_nan=False) if output is Format.JSON else in_flags(str(advice), RECORDING))
