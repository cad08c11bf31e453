"""`paceline lr-range-test`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import ClusterName, Format, JobName, Output, Overwrite, arguments, check_out, quorums
from paceline.utils.files import write_out, writing

if TYPE_CHECKING:
    from paceline.experiments.lr_range_test.search import LRRangeTest


def lr_range_test(
    context: typer.Context,
    job: JobName,
    protocol: Annotated[str, typer.Option(help="Protocol with a quorum k, given without it, for example k_sync.")],
    k: Annotated[str, typer.Option("--k", help="Quorums to test, for example 1,4,8,16.")],
    cluster: ClusterName,
    lowest: Annotated[float, typer.Option(help="Learning rate of the first update of a run.")] = 1e-3,
    highest: Annotated[float, typer.Option(help="Learning rate of the last update of a run.")] = 1.0,
    updates: Annotated[int, typer.Option(help="Updates per run; the learning rate rises with each.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0,
    runs: Annotated[int, typer.Option(min=1, help="Runs per quorum; the rate is read from their mean loss curve.")] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the rates and loss curves to.")] = None,
    overwrite: Overwrite = False,
    output: Output = Format.TEXT,
) -> None:
    """Find the learning rate for each quorum k with a learning-rate range test."""
    from paceline import lr_range_test as search
    from paceline.cli.log_handler import progress_console
    from paceline.jobs import load_job
    from paceline.recording.callbacks.progress_line import ProgressLine

    if out is not None:
        check_out(out, overwrite)
    console = progress_console()
    found = search(
        load_job(job),
        **arguments(context, without=("job", "k", "out", "overwrite", "output")),
        k=quorums(k),
        watch=lambda title, stop: ProgressLine(title, stop, console),
    )
    print(found.to_json().decode() if output is Format.JSON else found.text(), end="")
    if output is Format.TEXT:
        print(_advice(job, found))
    if out is not None:
        with writing(out, "; the rates are printed above"):
            write_out(out, found.to_json())


def _advice(job: str, found: LRRangeTest) -> str:
    last = found.knees[-1]
    rate = f"lr={last.learning_rate:.2g}"
    shown = rate if ":" in job else f"{job.partition('(')[0]}({rate})"
    return f"Use these rates in a job with lr_rule='constant': {shown} for k = {last.k}."
