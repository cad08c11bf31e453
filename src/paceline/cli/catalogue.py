"""`paceline protocols` and `paceline data fetch`."""

from __future__ import annotations

from inspect import getdoc, signature
from pathlib import Path
from typing import Annotated

import typer

DATA_FOLDERS = {"mnist": "data/mnist", "cifar10": "data/cifar-10-batches-bin"}  # where the jobs look


def protocols() -> None:
    """List the protocols with their knobs and papers."""
    from paceline.catalogue import CATALOGUE

    for name, factory in CATALOGUE.items():
        knobs = ", ".join(str(knob).replace("'", "") for knob in signature(factory).parameters.values())
        what, _, paper = (getdoc(factory) or "").partition("\n\n")
        print(f"{name}({knobs})" if knobs else name)
        for line in (what, paper):
            print(_wrapped(line))


def fetch(
    name: Annotated[str, typer.Argument(help="mnist or cifar10.")],
    to: Annotated[Path | None, typer.Option(help="Folder; data/NAME if left out.")] = None,
) -> None:
    """Download a data set from its public mirrors and check its SHA-256."""
    from paceline.jobs.fetch import fetch as download

    folder = to or Path(DATA_FOLDERS.get(name, "data"))
    download(name, folder)
    print(f"{name} is in {folder}")


def _wrapped(text: str) -> str:
    from textwrap import fill

    return fill(" ".join(text.split()), 80, initial_indent="    ", subsequent_indent="    ")
