"""`paceline search`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import EvaluateEvery, Format, Output, WorkerTimeout


def search(
    job: Annotated[str, typer.Argument(help="As for train.")],
    cluster: Annotated[str, typer.Option(help="As for train.")],
    stop: Annotated[str, typer.Option(help="As epochs=20 or gradients=64000: the workload of every run.")],
    first: Annotated[str, typer.Option(help="Protocol to begin with, and to be as accurate as.")] = "bsp",
    then: Annotated[str, typer.Option(help="Protocol to go on with.")] = "asp",
    target: Annotated[float | None, typer.Option(help="Accuracy to be kept, as 0.92; measured if left out.")] = None,
    margin: Annotated[float, typer.Option(help="By which the mean accuracy may fall short of it.")] = 0.01,
    settings: Annotated[int, typer.Option(help="Switch points that are tried.")] = 5,
    runs: Annotated[int, typer.Option(help="Of each of them.")] = 3,
    first_runs: Annotated[
        int | None, typer.Option(help="Of the first protocol alone; as --runs, or none with --target.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first run of each switch point.")] = 0,
    two_sided: Annotated[
        bool, typer.Option("--two-sided", help="Refuse what is too accurate as well, as the paper prints it.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder; runs/search-JOB-1, -2, ... if left out.")] = None,
    processes: Annotated[int | None, typer.Option(help="Runs at a time; one a core if left out.")] = None,
    evaluate_every: EvaluateEvery = None,
    worker_timeout_s: WorkerTimeout = None,
    output: Output = Format.TEXT,
) -> None:
    """Find how early one protocol may give way to another (Sync-Switch); the same again goes on."""
    from rich.console import Console

    from paceline import search_switch
    from paceline.experiments.runner.progress import ProgressBars
    from paceline.jobs import load_job

    with ProgressBars(Console(stderr=True)) as display:
        found = search_switch(
            load_job(job),
            cluster=cluster,
            stop=stop,
            first=first,
            then=then,
            target=target,
            margin=margin,
            settings=settings,
            runs=runs,
            first_runs=first_runs,
            seed=seed,
            two_sided=two_sided,
            out=out,
            processes=processes,
            evaluate_every=evaluate_every,
            worker_timeout_s=worker_timeout_s,
            display=display,
        )
    if found.timing is None:
        print(f"interrupted; the same again with --out {found.folder} goes on from there", file=sys.stderr)
        raise typer.Exit(130)
    if output is Format.JSON:
        import orjson

        print(orjson.dumps(found.as_table(), option=orjson.OPT_INDENT_2).decode())
        return
    file = found.timing.found_for.file
    print(found.text(), end="")
    print(f'It is written in {file}. To use it:\npaceline train {job} --protocol "sync_switch(timing={file})" ...')
