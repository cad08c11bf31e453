"""`paceline compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options


def compare(
    context: typer.Context,
    job: options.JobName,
    protocols: Annotated[str, typer.Option(help="Protocols to compare, for example 'bsp, k_sync(k=12), asp'.")],
    cluster: options.ClusterName,
    stop: Annotated[
        str, typer.Option(help="End of each run, for example loss=0.2,seconds=600: times to the target are compared.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Runs per protocol, with seeds 0, 1, ...")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the comparison. Default: runs/compare-JOB-1, -2, ...")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price of one worker-hour, for the cost column.")] = None,
    processes: options.Processes = None,
    evaluate_every: options.EvaluateEvery = None,
    worker_timeout_s: options.WorkerTimeout = None,
    output: options.Output = options.Format.TEXT,
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
            comparison = run(load_job(job), **options.arguments(context, without=("job", "output")), display=display)
        except FailedRunsError as error:
            failed, comparison = error, error.comparison
    if comparison.interrupted:
        options.exit_interrupted(comparison.folder)
    print(comparison.to_json().decode() if output is options.Format.JSON else comparison.text(), end="")
    if failed is not None:
        raise failed
