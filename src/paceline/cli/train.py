"""`paceline train`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import (
    CLUSTER,
    JOB,
    EvaluateEvery,
    Format,
    Output,
    PageAddress,
    WorkerTimeout,
    arguments,
    free_folder,
)
from paceline.cli.terminal import fitted
from paceline.cli.watch import Page, page_while_training
from paceline.engines.signals import holding_sigterm
from paceline.errors import RunError, UsageError
from paceline.recording.choices import last_choices
from paceline.recording.run_stats import count

if TYPE_CHECKING:
    from paceline.cli.saved_options import SavedOptions
    from paceline.jobs.job import Job
    from paceline.recording.callback import Callback
    from paceline.run.result import Result


# Options that are arguments of `train` as they are.
TRAINING = ("protocol", "seed", "evaluate_every", "checkpoint_every", "keep_checkpoints", "worker_timeout_s")
# Options of the command alone, which a resumed run does not take over.
NOT_SAVED = ("out", "overwrite", "resume", "allow_change", "trust", "serve", "address", "output")


class Censored(StrEnum):
    """Estimate of the duration of censored work."""

    KM = "km"


@holding_sigterm(acts_at_end=False)  # also while torch is imported
def train(
    context: typer.Context,
    job: Annotated[str | None, typer.Argument(help=JOB)] = None,
    protocol: Annotated[
        str | None, typer.Option(help="Protocol, for example bsp, k_sync(k=12) or 'bsp@25% >> asp'.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help=CLUSTER)] = None,
    stop: Annotated[
        str | None, typer.Option(help="Conditions that end the run, for example loss=0.2,seconds=60 or nll<=1.4.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed. Default: 0.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/JOB-1, -2, ...")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in that folder.")] = False,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a run to resume; options not given are taken from it.")
    ] = None,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Allow another protocol or cluster for --resume.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Import the job named by the resumed folder without checking its code.")
    ] = False,
    evaluate_every: EvaluateEvery = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(help="Interval between checkpoints, for example updates=100. Default: seconds=60, real time."),
    ] = None,
    keep_checkpoints: Annotated[int | None, typer.Option(min=1, help="Number of checkpoints kept. Default: 3.")] = None,
    worker_timeout_s: WorkerTimeout = None,
    lr_rule: Annotated[
        str | None,
        typer.Option(help="How the learning rate follows the gradients of an update: constant, proportional, noise."),
    ] = None,
    lr_of: Annotated[
        str | None,
        typer.Option(
            help="For noise and auto: what the rate was tuned for, bsp or a number of gradients. Default: bsp."
        ),
    ] = None,
    measure_steps: Annotated[
        bool,
        typer.Option("--measure-steps", help="Record how far each update moves the parameters, for paceline advise."),
    ] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Write timeline.json for ui.perfetto.dev.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write scalars for TensorBoard into the folder of the run.")
    ] = False,
    metrics: Annotated[
        str | None,
        typer.Option(help="Serve metrics to Prometheus at PORT of 127.0.0.1, for example 9464, or at HOST:PORT."),
    ] = None,
    censored: Annotated[
        Censored | None, typer.Option(help="Estimate of censored times in a trace; km: Kaplan-Meier.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a live page of the run for browsers until it ends.")
    ] = False,
    address: PageAddress = None,
    output: Output = Format.TEXT,
) -> None:
    """Train a job with a protocol on a cluster."""
    if trust and resume is None:
        raise UsageError("--trust only works with --resume, for the job that a folder names; remove --trust")
    page = page_while_training(address, serve=serve)
    from paceline.cli.saved_options import SavedOptions

    given = arguments(context, without=NOT_SAVED)
    # A flag that is not given must not override that of the resumed run.
    options = SavedOptions({name: None if value is False else value for name, value in given.items()})
    chosen = _chosen(options) if resume is None and job is not None else {}
    options = SavedOptions({**options, **chosen}).completed(resume, trust=trust)
    _print_chosen(chosen)
    result = _train(options, out, resume, page, overwrite=overwrite, allow_change=allow_change)
    if result.folder is None:  # rank 0 prints the results; the status shows torchrun that this rank is interrupted too
        raise typer.Exit(130 if result.stopped_by == "interrupted" else 0)
    _print_result(result, output)
    if result.stopped_by.is_failure:
        raise RunError(result.reason)
    if result.stopped_by == "interrupted":
        print(f"to resume: paceline train --resume {result.folder}", file=sys.stderr)
        raise typer.Exit(130)


def _chosen(options: SavedOptions) -> dict[str, str]:
    from paceline.cli.default_options import default_options
    from paceline.clusters.launch_env import started_by_torchrun

    return default_options(options, under_torchrun=started_by_torchrun(os.environ))


def _print_chosen(options: Mapping[str, str]) -> None:
    """Print the options that were chosen by default, on rank 0."""
    from paceline.cli.log_handler import is_quiet
    from paceline.clusters.launch_env import is_rank_0

    if options and not is_quiet() and is_rank_0(os.environ):
        flags = " ".join(f"--{name} {shlex.quote(value)}" for name, value in options.items())
        print(fitted(f"chosen by default: {flags}", sys.stderr), file=sys.stderr)


def _train(
    options: SavedOptions, out: Path | None, resume: Path | None, page: Page, *, overwrite: bool, allow_change: bool
) -> Result:
    from paceline import train as run
    from paceline.cli.log_handler import is_quiet
    from paceline.clusters.parser import parse_cluster
    from paceline.clusters.torchrun import Torchrun
    from paceline.core.stop import Stop
    from paceline.jobs import load_job

    if resume is not None and (out is not None or overwrite):
        raise UsageError(
            f"--resume continues the run in {resume}; remove --out and --overwrite (to keep its state, copy it first)"
        )
    stop = Stop.parse(options["stop"])
    cluster = parse_cluster(options["cluster"], options["censored"])
    job = _with_rate(load_job(options["job"]), options)
    restarts = cluster.ranks.max_restarts if isinstance(cluster, Torchrun) and cluster.ranks.launch_rank == 0 else 0
    if restarts and not (out or resume):
        raise UsageError(
            "the launcher may start rank 0 again (--max-restarts): give --out FOLDER, which it then resumes"
        )
    folder = resume or out or free_folder(job.name)
    place = folder.absolute()  # for callbacks, which an actor of Ray runs in another folder
    with options.saved_if_rescued(), page(folder):
        return run(
            job,
            **{name: options[name] for name in TRAINING},
            cluster=cluster,
            stop=stop,
            out=None if resume else folder,
            overwrite=overwrite,
            resume=resume,
            allow_change=allow_change,
            callbacks=[options.saver(place), *_writers(place, options)],
            measure_steps=bool(options["measure_steps"]),
            progress=not is_quiet(),
        )


def _with_rate(job: Job, options: SavedOptions) -> Job:
    """Return the job with the learning-rate rule of the command line, if there is one."""
    lr_of = options["lr_of"]
    given = {"lr_rule": options["lr_rule"], "lr_of": int(lr_of) if lr_of and lr_of.isdigit() else lr_of}
    return replace(job, **{name: value for name, value in given.items() if value is not None})


def _print_result(result: Result, output: Format) -> None:
    from paceline.recording.run_folder import plain

    counted = count(result.history)
    folder = str(result.folder) if result.folder else None
    stats = {**counted.plain(), "updates_per_s": counted.updates_per_s, "folder": folder}
    chosen = last_choices(result.history)
    if output is Format.JSON:
        print(json.dumps(plain({**stats, **({"chosen": chosen} if chosen else {})}), allow_nan=False))
        return
    metrics = {f"test {name}": value for name, value in stats.pop("metrics").items()}
    for name, value in {**stats, **metrics}.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(fitted(f"{name.replace('_', ' '):16} {shown}", sys.stdout, indent=17))
    if chosen:
        print(fitted(f"{'chosen':16} {chosen}", sys.stdout, indent=17))


def _writers(folder: Path, options: SavedOptions) -> list[Callback]:
    from paceline.callbacks import PerfettoTrace, Prometheus, TensorBoard
    from paceline.recording.run_folder import TENSORBOARD, TIMELINE

    writers: list[Callback] = []
    if options["timeline"]:
        writers.append(PerfettoTrace(folder / TIMELINE))
    if options["tensorboard"]:
        writers.append(TensorBoard(folder / TENSORBOARD))
    if options["metrics"] is not None:
        writers.append(Prometheus.parse(options["metrics"]))
    return writers
