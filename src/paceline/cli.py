"""The program `paceline`. Exit status: 0 done, 1 the run failed, 2 it cannot work as asked, 130 interrupted."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from inspect import getdoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import PacelineError, RunError, UsageError

if TYPE_CHECKING:
    from paceline.callbacks import Callback

app = typer.Typer(
    help="Straggler-proof data-parallel training for PyTorch.",
    epilog="Exit status: 0 done, 1 the run failed, 2 it cannot work as asked, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
)
data_app = typer.Typer(help="Data sets of the jobs mnist and cifar10.", no_args_is_help=True)
app.add_typer(data_app, name="data")


_DATA_FOLDERS = {"mnist": "data/mnist", "cifar10": "data/cifar-10-batches-bin"}  # where the jobs look


class Format(StrEnum):
    """How results are printed."""

    TEXT = "text"
    JSON = "json"


class Censored(StrEnum):
    """How long censored work takes."""

    KM = "km"


@app.command()
def train(
    job: Annotated[
        str | None, typer.Argument(help="digits, mnist, cifar10, mnist(folder=DIR), or module:object.")
    ] = None,
    protocol: Annotated[str | None, typer.Option(help="As bsp, k_sync(k=12) or 'bsp@25% >> asp'.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="As local:4, '16*exp(mean=1)', trace:FILE or cluster.toml.")
    ] = None,
    stop: Annotated[str | None, typer.Option(help="As loss=0.2,seconds=60; the first to be reached.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything that is drawn; 0 if left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/JOB-1, -2, ... if left out.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run there.")] = False,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a run to go on with; what is left out is as it was.")
    ] = None,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Resume under another protocol or on another cluster.")
    ] = False,
    evaluate_every: Annotated[str | None, typer.Option(help="As epochs=1 or updates=100.")] = None,
    checkpoint_every: Annotated[str, typer.Option(help="As updates=100, or seconds=60 of real time.")] = "seconds=60",
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="How many are kept.")] = 3,
    worker_timeout_s: Annotated[
        float | None, typer.Option(help="Silence after which a worker is taken for lost.")
    ] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="Write timeline.json, for ui.perfetto.dev.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write scalars for TensorBoard.")] = False,
    censored: Annotated[
        Censored | None, typer.Option(help="Draw how long censored work of a trace takes; km: Kaplan-Meier.")
    ] = None,
    output: Annotated[Format, typer.Option("--format", help="What is printed at the end.")] = Format.TEXT,
) -> None:
    """Train a job with a protocol on a cluster."""
    from rich.console import Console

    from paceline import train as run
    from paceline.cluster_text import parse_cluster
    from paceline.command_line import Typed
    from paceline.jobs import load_job
    from paceline.progress import ProgressLine
    from paceline.run_folder import plain
    from paceline.stop import Stop
    from paceline.summary import summary

    typed = Typed(
        job=job,
        protocol=protocol,
        cluster=cluster,
        stop=stop,
        seed=seed,
        evaluate_every=evaluate_every,
        worker_timeout_s=worker_timeout_s,
        censored=censored,
    )
    typed = typed.completed(resume)
    until = Stop.parse(typed["stop"])
    workers = parse_cluster(typed["cluster"], typed["censored"])
    loaded = load_job(typed["job"])
    folder = resume or out or _free_folder(loaded.name)
    with ProgressLine(typed["protocol"], until, Console(stderr=True)) as progress:
        result = run(
            loaded,
            protocol=typed["protocol"],
            cluster=workers,
            stop=until,
            seed=typed["seed"],
            out=None if resume else folder,
            overwrite=overwrite,
            resume=resume,
            allow_change=allow_change,
            callbacks=[typed.kept_in(folder), progress, *_writers(folder, timeline, tensorboard)],
            evaluate_every=typed["evaluate_every"],
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            worker_timeout_s=typed["worker_timeout_s"],
        )
    figures = summary(result)
    if output is Format.JSON:
        print(json.dumps(plain(figures), allow_nan=False))
    else:
        _print_figures(figures)
    if result.stopped_by.is_failure:
        raise RunError(result.reason)
    if result.stopped_by == "interrupted":
        print(f"paceline train --resume {folder} goes on with it", file=sys.stderr)
        raise typer.Exit(130)


@app.command()
def replay(run: Annotated[Path, typer.Argument(help="Folder of the run.")]) -> None:
    """Feed a run's own arrivals to the coordinator again and say whether it decides the same."""
    from paceline import replay as feed

    found = feed(run)
    if not found.is_same:
        raise RunError(f"{run}: not the same {found.difference}")
    print(f"{found.updates} updates, {found.decisions} decisions: all the same.")


@app.command()
def compare(
    job: Annotated[str, typer.Argument(help="As for train.")],
    protocols: Annotated[str, typer.Option(help="As 'bsp, k_sync(k=12), asp'.")],
    cluster: Annotated[str, typer.Option(help="As for train.")],
    stop: Annotated[str, typer.Option(help="As loss=0.2,seconds=600; the time to its loss or accuracy is compared.")],
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each protocol: seeds 0, 1, ...")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder; runs/compare-JOB-1, -2, ... if left out.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Of a worker-hour, for the cost.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time; one a core if left out.")] = None,
    evaluate_every: Annotated[str | None, typer.Option(help="As epochs=1 or updates=100.")] = None,
    worker_timeout_s: Annotated[
        float | None, typer.Option(help="Silence after which a worker is taken for lost.")
    ] = None,
    output: Annotated[Format, typer.Option("--format", help="What is printed at the end.")] = Format.TEXT,
) -> None:
    """Train a job with several protocols and seeds, and compare what they took; the same again goes on."""
    from rich.console import Console

    from paceline import compare as run
    from paceline.comparison.progress import ProgressBars
    from paceline.jobs import load_job

    with ProgressBars(Console(stderr=True)) as display:
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
    if comparison.interrupted:
        print(f"interrupted; the same again with --out {comparison.folder} goes on from there", file=sys.stderr)
        raise typer.Exit(130)
    print(comparison.to_json().decode() if output is Format.JSON else comparison.text(), end="")
    if output is Format.TEXT:
        print(f"The table and a folder for each run are in {comparison.folder}.")
    if comparison.failures:
        raise RunError(f"{len(comparison.failures)} runs failed: {'; '.join(comparison.failures)}")


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("trace.csv"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier file there.")] = False,
) -> None:
    """Extract the round trips of a run, to replay them with --cluster trace:FILE."""
    from paceline.run_folder import SavedRun
    from paceline.timing import Trace

    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists already; give another file, or --overwrite")
    recorded = Trace.of(SavedRun(run), source=str(run))
    recorded.to_csv(out)
    censored = f"{recorded.censored_rows} of them censored"
    print(f"{out}: {len(recorded.rows)} round trips of {recorded.workers} workers, {censored}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs of one job, or folders above them.")],
    out: Annotated[Path | None, typer.Option(help="The file; report.html in the folder, if it is only one.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for every figure as PNG and SVG.")] = None,
) -> None:
    """Show runs on one page that opens in a browser, without any network."""
    from paceline.report import write_report

    print(write_report(runs, out, figures))


@app.command()
def protocols() -> None:
    """List the protocols with their knobs and papers."""
    from paceline.catalogue import CATALOGUE

    for name, factory in CATALOGUE.items():
        knobs = ", ".join(str(knob).replace("'", "") for knob in signature(factory).parameters.values())
        what, _, paper = (getdoc(factory) or "").partition("\n\n")
        print(f"{name}({knobs})" if knobs else name)
        for line in (what, paper):
            print(_wrapped(line))


@data_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="mnist or cifar10.")],
    to: Annotated[Path | None, typer.Option(help="Folder; data/NAME if left out.")] = None,
) -> None:
    """Download a data set from its public mirrors and check its SHA-256."""
    from paceline.jobs.fetch import fetch as download

    folder = to or Path(_DATA_FOLDERS.get(name, "data"))
    download(name, folder)
    print(f"{name} is in {folder}")


def main() -> None:
    """Run the program; every error that paceline raises on purpose is one line."""
    try:
        status = app(standalone_mode=False)
    except UsageError as error:
        _say(error)
        status = 2
    except PacelineError as error:
        _say(error)
        status = 1
    except typer.TyperException as error:
        if str(error):  # without arguments, the help is all there is to say
            print(f"paceline: {error} (paceline --help tells more)", file=sys.stderr)
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    sys.exit(status)


def _say(error: PacelineError) -> None:
    details = getattr(error, "details", None)
    if details:
        print(details, file=sys.stderr)
    print(f"paceline: {error}", file=sys.stderr)


def _print_figures(figures: dict[str, object]) -> None:
    metrics = figures.pop("metrics")
    assert isinstance(metrics, dict)
    for name, value in {**figures, **{f"test {name}": value for name, value in metrics.items()}}.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name.replace('_', ' '):16} {shown}")


def _writers(folder: Path, timeline: bool, tensorboard: bool) -> list[Callback]:
    from paceline import TensorBoard, Timeline

    writers: list[Callback] = [Timeline(folder / "timeline.json")] if timeline else []
    return [*writers, TensorBoard(folder / "tensorboard")] if tensorboard else writers


def _free_folder(job: str) -> Path:
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in job)
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


def _wrapped(text: str) -> str:
    from textwrap import fill

    return fill(" ".join(text.split()), 80, initial_indent="    ", subsequent_indent="    ")
