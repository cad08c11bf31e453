"""`paceline compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import (
    ClusterName,
    EvaluateEvery,
    Format,
    JobName,
    Output,
    Processes,
    WorkerTimeout,
    exit_interrupted,
)


def compare(
    job: JobName,
    protocols: Annotated[str, typer.Option(help="Protocols to compare, for example 'bsp, k_sync(k=12), asp'.")],
    cluster: ClusterName,
    stop: Annotated[
        str, typer.Option(help="End of each run, for example loss=0.2,seconds=600: times to the target are compared.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Runs per protocol, with seeds 0, 1, ...")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the comparison. Default: runs/compare-JOB-1, -2, ...")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price of one worker-hour, for the cost column.")] = None,
    processes: Processes = None,
    evaluate_every: EvaluateEvery = None,
    worker_timeout_s: WorkerTimeout = None,
    output: Output = Format.TEXT,
) -> None:
    """Train a job with several protocols and seeds and compare them. Run the same command again to resume."""
    from paceline import compare as run
    from paceline.cli.log_handler import progress_console
    from paceline.experiments.comparison import FailedRunsError
    from paceline.experiments.runner.progress import ProgressBars
    from paceline.jobs import load_job

    failed = None
    with ProgressBars(progress_console()) as display:
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
        exit_interrupted(comparison.folder)
    print(comparison.to_json().decode() if output is Format.JSON else comparison.text(), end="")
    if failed is not None:
        raise failed
