"""Options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Format(StrEnum):
    """How results are printed."""

    TEXT = "text"
    JSON = "json"


Output = Annotated[Format, typer.Option("--format", help="What is printed at the end.")]
EvaluateEvery = Annotated[str | None, typer.Option(help="As epochs=1 or updates=100.")]
WorkerTimeout = Annotated[float | None, typer.Option(help="Silence after which a worker is taken for lost.")]
