"""`paceline protocols` and `paceline data fetch`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Format, Output

DATA_FOLDERS = {  # default folders of the jobs
    "mnist": "data/mnist",
    "cifar10": "data/cifar-10-batches-bin",
    "cifar100": "data/cifar-100-binary",
}
TITLES = {
    "plan": "Plans of several protocols, for the whole run",
    "modifier": "Modifiers, added with a plus, for example asp + staleness_lr(C=0.01)",
}


def protocols(output: Output = Format.TEXT) -> None:
    """List protocols, plans and modifiers with their arguments and papers."""
    from paceline.catalogue.modifiers import ADDITIONS
    from paceline.catalogue.parser import PLANS
    from paceline.catalogue.protocols import CATALOGUE

    parts = {"protocol": _entries(CATALOGUE), "plan": _entries(PLANS), "modifier": _entries(ADDITIONS)}
    if output is Format.JSON:
        print(json.dumps([{"kind": kind, **entry} for kind, entries in parts.items() for entry in entries]))
        return
    for kind, entries in parts.items():
        if kind in TITLES:
            print(f"\n{TITLES[kind]}:\n")
        for entry in entries:
            print(_wrapped(entry["call"], indent=""))
            print(_wrapped(entry["summary"]))
            print(_wrapped(entry["source"]))


def _entries(factories: Mapping[str, Callable[..., object]]) -> list[dict[str, str]]:
    """Return, for each factory, its call with its defaults, its summary and the paper it is from."""
    entries = []
    for name, factory in factories.items():
        knobs = ", ".join(_parameter(knob) for knob in signature(factory).parameters.values())
        summary, *_, source = (" ".join(part.split()) for part in (getdoc(factory) or "").split("\n\n"))
        entries.append({"call": f"{name}({knobs})" if knobs else name, "summary": summary, "source": source})
    return entries


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
