"""Options that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from paceline.errors import UsageError

JOB = "digits, mnist, cifar10, cifar100, mnist(folder=DIR), or module:object."
CLUSTER = (
    "local:4, '16*exp(mean=1)', trace:FILE, cluster.toml, 'ray(workers=8)', or torchrun (the default of ranks that "
    "paceline run or torchrun has started)."
)


class Format(StrEnum):
    """Format of the results on standard output."""

    TEXT = "text"
    JSON = "json"


JobName = Annotated[str, typer.Argument(help=JOB)]
ClusterName = Annotated[str, typer.Option(help="local:4, '16*exp(mean=1)', trace:FILE, or cluster.toml.")]
Output = Annotated[Format, typer.Option("--format", help="Format of the results.")]
EvaluateEvery = Annotated[
    str | None, typer.Option(help="Interval between evaluations, for example epochs=1 or updates=100.")
]
WorkerTimeout = Annotated[
    float | None, typer.Option(help="Seconds without an answer after which a worker counts as lost.")
]
PageAddress = Annotated[
    str | None,
    typer.Option("--address", help="HOST:PORT of the page; port 0 for any. Default: 127.0.0.1:8765, if it is free."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]
Processes = Annotated[int | None, typer.Option(min=1, help="Number of parallel runs. Default: one per core.")]


def quorums(text: str) -> list[int]:
    """Parse the value of ``--k``: quorums separated by commas."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise UsageError(f"--k {text!r}, expected whole numbers, for example --k 1,4,8,16") from None


def arguments(context: typer.Context, without: Collection[str]) -> dict[str, Any]:
    """Return the options of a command that are arguments of the same name of its function.

    Args:
        context: context of the command.
        without: names of the other options.
    """
    return {name: value for name, value in context.params.items() if name not in without}


def exit_interrupted(folder: Path) -> NoReturn:
    """End a command whose runs the user interrupted, with the way to resume them."""
    print(f"interrupted; to resume, run the same command with --out {folder}", file=sys.stderr)
    raise typer.Exit(130)


def check_not_empty(words: Sequence[str]) -> None:
    """Raise a UsageError if a word of the command line is empty."""
    if "" in words:
        raise UsageError("an argument is empty; is a variable of the shell not set?")


def check_out(out: Path, overwrite: bool) -> None:
    """Refuse an output file that cannot be written, before anything is computed.

    Raises:
        UsageError: the file exists and may not be replaced, or its folder is missing.
    """
    if os.path.lexists(out) and not overwrite:
        raise UsageError(f"{out} exists already; give another file, or --overwrite")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {out.parent} for {out.name}; make it, or give another file")


def free_folder(name: str) -> Path:
    """Return the folder of a run that is given none: runs/NAME-1, -2, and so on, the first that does not exist."""
    plain = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)
    number = 1
    while os.path.lexists(folder := Path("runs") / f"{plain}-{number}"):
        number += 1
    return folder
