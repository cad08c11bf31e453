"""`paceline protocols` and `paceline data fetch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Annotated

import typer

DATA_FOLDERS = {  # default folders of the jobs
    "mnist": "data/mnist",
    "cifar10": "data/cifar-10-batches-bin",
    "cifar100": "data/cifar-100-binary",
}


def protocols() -> None:
    """List protocols, plans and modifiers with their arguments and papers."""
    from paceline.catalogue.modifiers import ADDITIONS
    from paceline.catalogue.parser import PLANS
    from paceline.catalogue.protocols import CATALOGUE

    _list(CATALOGUE)
    print("\nPlans of several protocols, for the whole run:\n")
    _list(PLANS)
    print("\nModifiers, added with a plus, for example asp + staleness_lr(C=0.01):\n")
    _list(ADDITIONS)


def _list(factories: Mapping[str, Callable[..., object]]) -> None:
    for name, factory in factories.items():
        knobs = ", ".join(_parameter(knob) for knob in signature(factory).parameters.values())
        summary, _, paper = (getdoc(factory) or "").partition("\n\n")
        print(_wrapped(f"{name}({knobs})" if knobs else name, indent=""))
        for line in (summary, paper):
            print(_wrapped(line))


def fetch(
    name: Annotated[str, typer.Argument(help="Name of the data set: mnist, cifar10 or cifar100.")],
    to: Annotated[Path | None, typer.Option(help="Folder to write to. Default: data/NAME.")] = None,
) -> None:
    """Download a data set from its public mirrors and check its SHA-256."""
    from paceline.jobs.datasets.download import fetch as download

    folder = to or Path(DATA_FOLDERS.get(name, "data"))
    download(name, folder)
    print(f"{name} is in {folder}")


def _parameter(knob: Parameter) -> str:
    """Return a parameter in the syntax of a protocol, with its default if it has one."""
    if knob.default is Parameter.empty:
        return knob.name
    default = str(knob.default).lower()
    return f"{knob.name}={repr(default) if '(' in default else default}"


def _wrapped(text: str, indent: str = "    ") -> str:
    from textwrap import fill

    return fill(" ".join(text.split()), 80, initial_indent=indent, subsequent_indent="    ")
