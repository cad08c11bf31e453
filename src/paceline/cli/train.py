"""`paceline train`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import EvaluateEvery, Format, Output, WorkerTimeout
from paceline.cli.terminal import fitted
from paceline.engines.signals import holding_sigterm
from paceline.errors import RunError, UsageError
from paceline.recording.run_stats import count
from paceline.run.train import Result

if TYPE_CHECKING:
    from paceline.cli.saved_options import SavedOptions
    from paceline.clusters.local import LocalCluster
    from paceline.clusters.simulated import Cluster
    from paceline.clusters.torchrun import Torchrun
    from paceline.recording.callback import Callback


class Censored(StrEnum):
    """How long censored work takes."""

    KM = "km"


@holding_sigterm(acts_at_end=False)  # also while torch is imported
def train(
    job: Annotated[
        str | None, typer.Argument(help="digits, mnist, cifar10, cifar100, mnist(folder=DIR), or module:object.")
    ] = None,
    protocol: Annotated[str | None, typer.Option(help="As bsp, k_sync(k=12) or 'bsp@25% >> asp'.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="As local:4, '16*exp(mean=1)', torchrun (if left out, where torchrun starts this), trace:FILE or "
            "cluster.toml."
        ),
    ] = None,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Under torchrun, without a server: go on when some ranks are gone.")
    ] = False,
    stop: Annotated[
        str | None, typer.Option(help="As loss=0.2,seconds=60 or nll<=1.4; the first to be reached.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything that is drawn; 0 if left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/JOB-1, -2, ... if left out.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run there.")] = False,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a run to go on with; what is left out is as it was.")
    ] = None,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Resume under another protocol or on another cluster.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Import the job that the resumed folder names without a check.")
    ] = False,
    evaluate_every: EvaluateEvery = None,
    checkpoint_every: Annotated[
        str | None, typer.Option(help="As updates=100; seconds=60 of real time if left out.")
    ] = None,
    keep_checkpoints: Annotated[int | None, typer.Option(min=1, help="How many are kept; 3 if left out.")] = None,
    worker_timeout_s: WorkerTimeout = None,
    measure_steps: Annotated[
        bool, typer.Option("--measure-steps", help="Log how far each update moves the parameters, for advise.")
    ] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Write timeline.json, for ui.perfetto.dev.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write scalars for TensorBoard.")] = False,
    censored: Annotated[
        Censored | None, typer.Option(help="Draw how long censored work of a trace takes; km: Kaplan-Meier.")
    ] = None,
    output: Output = Format.TEXT,
) -> None:
    """Train a job with a protocol on a cluster."""
    if trust and resume is None:
        raise UsageError("--trust is for --resume: a job that is typed is imported as typed; leave --trust out")
    from paceline.cli.saved_options import SavedOptions

    typed = SavedOptions(
        job=job,
        protocol=protocol,
        cluster=cluster,
        elastic=elastic or None,
        stop=stop,
        seed=seed,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        worker_timeout_s=worker_timeout_s,
        measure_steps=measure_steps or None,
        timeline=timeline or None,
        tensorboard=tensorboard or None,
        censored=censored,
    )
    result = _train(typed.completed(resume, trust=trust), out, resume, overwrite=overwrite, allow_change=allow_change)
    if result.folder is None:  # rank 0 tells; whoever starts ranks again has to see that this one is not done either
        raise typer.Exit(130 if result.stopped_by == "interrupted" else 0)
    _print_result(result, output)
    if result.stopped_by.is_failure:
        raise RunError(result.reason)
    if result.stopped_by == "interrupted":
        print(f"paceline train --resume {result.folder} goes on with it", file=sys.stderr)
        raise typer.Exit(130)


def _train(
    typed: SavedOptions, out: Path | None, resume: Path | None, *, overwrite: bool, allow_change: bool
) -> Result:
    from paceline import train as run
    from paceline.clusters.parser import parse_cluster
    from paceline.clusters.torchrun import Torchrun
    from paceline.core.stop import Stop
    from paceline.jobs import load_job

    if resume is not None and (out is not None or overwrite):
        raise UsageError(f"a resumed run stays where it is, in {resume}; copy it first, without --out and --overwrite")
    stop = Stop.parse(typed["stop"])
    cluster = parse_cluster(typed["cluster"], typed["censored"])
    if typed["elastic"]:
        cluster = _elastic(cluster)
    job = load_job(typed["job"])
    if isinstance(cluster, Torchrun) and cluster.ranks.max_restarts and not (out or resume):
        raise UsageError("torchrun may start this job again: give --out FOLDER, so that it goes on with the same run")
    folder = resume or out or _free_folder(job.name)
    with typed.kept_if_rescued():
        return run(
            job,
            protocol=typed["protocol"],
            cluster=cluster,
            stop=stop,
            seed=typed["seed"],
            out=None if resume else folder,
            overwrite=overwrite,
            resume=resume,
            allow_change=allow_change,
            callbacks=[typed.kept_in(folder), *_writers(folder, typed)],
            evaluate_every=typed["evaluate_every"],
            checkpoint_every=typed["checkpoint_every"],
            keep_checkpoints=typed["keep_checkpoints"],
            worker_timeout_s=typed["worker_timeout_s"],
            measure_steps=bool(typed["measure_steps"]),
            progress=True,
        )


def _elastic(cluster: Cluster | LocalCluster | Torchrun) -> Torchrun:
    from paceline.clusters.torchrun import Torchrun

    if not isinstance(cluster, Torchrun):
        raise UsageError(
            "--elastic is for ranks that torchrun starts; on other clusters type 'bsp + elastic' and the like"
        )
    return replace(cluster, elastic=True)


def _print_result(result: Result, output: Format) -> None:
    from paceline.recording.run_folder import plain

    figures = summary(result)
    if output is Format.JSON:
        print(json.dumps(plain(figures), allow_nan=False))
    else:
        _print_figures(figures)


def _print_figures(figures: dict[str, object]) -> None:
    metrics = figures.pop("metrics")
    assert isinstance(metrics, dict)
    for name, value in {**figures, **{f"test {name}": value for name, value in metrics.items()}}.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(fitted(f"{name.replace('_', ' '):16} {shown}", sys.stdout, indent=17))


def _writers(folder: Path, typed: SavedOptions) -> list[Callback]:
    from paceline import PerfettoTrace, TensorBoard
    from paceline.recording.run_folder import TENSORBOARD, TIMELINE

    writers: list[Callback] = [PerfettoTrace(folder / TIMELINE)] if typed["timeline"] else []
    return [*writers, TensorBoard(folder / TENSORBOARD)] if typed["tensorboard"] else writers


def _free_folder(job: str) -> Path:
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in job)
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


def summary(result: Result) -> dict[str, Any]:
    """Return the figures of a run, as plain values."""
    figures = count(result.history)
    return {
        **figures.plain(),
        "updates_per_s": figures.updates_per_s,
        "folder": str(result.folder) if result.folder else None,
    }
