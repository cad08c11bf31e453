"""`paceline compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import EvaluateEvery, Format, Output, WorkerTimeout


def compare(
    job: Annotated[str, typer.Argument(help="As for train.")],
    protocols: Annotated[str, typer.Option(help="As 'bsp, k_sync(k=12), asp'.")],
    cluster: Annotated[str, typer.Option(help="As for train.")],
    stop: Annotated[str, typer.Option(help="As loss=0.2,seconds=600 or nll<=1.4; the time to its target is compared.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each protocol: seeds 0, 1, ...")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder; runs/compare-JOB-1, -2, ... if left out.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Of a worker-hour, for the cost.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time; one a core if left out.")] = None,
    evaluate_every: EvaluateEvery = None,
    worker_timeout_s: WorkerTimeout = None,
    output: Output = Format.TEXT,
) -> None:
    """Train a job with several protocols and seeds, and compare what they took; the same again goes on."""
    from rich.console import Console

    from paceline import compare as run
    from paceline.experiments.comparison import FailedRunsError
    from paceline.experiments.runner.progress import ProgressBars
    from paceline.jobs import load_job

    failed = None
    with ProgressBars(Console(stderr=True)) as display:
        try:
            comparison = run(
                load_job(job),
                protocols=protocols,
                cluster=cluster,
                stop=stop,
                seeds=seeds,
                out=out,
                processes=processes,
                evaluate_every=evaluate_every,
                worker_timeout_s=worker_timeout_s,
                price=price,
                display=display,
            )
        except FailedRunsError as error:
            failed, comparison = error, error.comparison
    if comparison.interrupted:
        print(f"interrupted; the same again with --out {comparison.folder} goes on from there", file=sys.stderr)
        raise typer.Exit(130)
    print(comparison.to_json().decode() if output is Format.JSON else comparison.text(), end="")
    if failed is not None:
        raise failed
