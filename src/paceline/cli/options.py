"""Options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import UsageError


class Format(StrEnum):
    """How results are printed."""

    TEXT = "text"
    JSON = "json"


Output = Annotated[Format, typer.Option("--format", help="What is printed at the end.")]
EvaluateEvery = Annotated[str | None, typer.Option(help="As epochs=1 or updates=100.")]
WorkerTimeout = Annotated[float | None, typer.Option(help="Silence after which a worker is taken for lost.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier file there.")]


def quorums(text: str) -> list[int]:
    """Read what is given to --k."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise UsageError(f"--k {text!r}, expected whole numbers, as --k 1,4,8,16") from None


def check_out(out: Path, overwrite: bool) -> None:
    """Refuse beforehand what could not be written afterwards."""
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists already; give another file, or --overwrite")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {out.parent} for {out.name}; make it, or give another file")
