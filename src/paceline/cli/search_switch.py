"""`paceline search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options


def search(
    context: typer.Context,
    job: options.JobName,
    cluster: options.ClusterName,
    stop: Annotated[str, typer.Option(help="Workload of each run, for example epochs=20 or gradients=64000.")],
    first: Annotated[str, typer.Option(help="First protocol of a run; alone, it sets the accuracy to keep.")] = "bsp",
    then: Annotated[str, typer.Option(help="Protocol after the switch.")] = "asp",
    target: Annotated[
        float | None,
        typer.Option(help="Accuracy to keep, for example 0.92. Default: measured with the first protocol."),
    ] = None,
    margin: Annotated[
        str, typer.Option(help="Accepted loss of mean accuracy, or auto: the deviation of the first protocol's runs.")
    ] = "0.01",
    settings: Annotated[int, typer.Option(help="Number of switch points to test.")] = 5,
    runs: Annotated[int, typer.Option(help="Runs per switch point.")] = 3,
    first_runs: Annotated[
        int | None, typer.Option(help="Runs of the first protocol alone. Default: as --runs, or 0 with --target.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first run of each switch point.")] = 0,
    two_sided: Annotated[
        bool, typer.Option("--two-sided", help="Also reject a mean accuracy above the target by more than the margin.")
    ] = False,
    accuracy: Annotated[
        str, typer.Option(help="Accuracy that counts: final, or converged: five evaluations within 0.1 %.")
    ] = "final",
    out: Annotated[Path | None, typer.Option(help="Folder of the search. Default: runs/search-JOB-1, -2, ...")] = None,
    processes: options.Processes = None,
    evaluate_every: options.EvaluateEvery = None,
    worker_timeout_s: options.WorkerTimeout = None,
    output: options.Output = options.Format.TEXT,
) -> None:
    """Find how early a run can switch protocols (Sync-Switch). Run the same command again to resume."""
    from paceline import search_switch
    from paceline.cli.log_handler import progress_console
    from paceline.experiments.runner.progress import ProgressBars
    from paceline.jobs import load_job

    with ProgressBars(progress_console()) as display:
        found = search_switch(
            load_job(job),
            **options.arguments(context, without=("job", "margin", "output")),
            margin=_margin(margin),
            display=display,
        )
    if found.timing is None:
        options.exit_interrupted(found.folder)
    if output is options.Format.JSON:
        import orjson

        print(orjson.dumps(found.as_table(), option=orjson.OPT_INDENT_2).decode())
        return
    file = found.timing.found_for.file
    print(found.text(), end="")
    print(f'Result written to {file}. To use it:\npaceline train {job} --protocol "sync_switch(timing={file})" ...')


def _margin(text: str) -> Any:
    """Return the margin as a number where it is one; else the text, which is checked as the argument."""
    try:
        return float(text)
    except ValueError:
        return text
