"""`paceline doctor`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Format, Output
from paceline.diagnostics import Check, Status, checks
from paceline.errors import RunError
from paceline.utils.wording import counted

COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.PROBLEM: "bold red"}


def doctor(
    folder: Annotated[Path, typer.Option(help="Folder in which runs will be written.")] = Path(),
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the checks that start processes; they take seconds.")
    ] = False,
    output: Output = Format.TEXT,
) -> None:
    """Check this machine: what works here, and what to do about the rest."""
    if output is Format.JSON:
        found = list(checks(folder, quick=quick))
        print(json.dumps([asdict(check) for check in found]))
    else:
        found = _printed(folder, quick=quick)
    problems = [check.subject for check in found if check.status is Status.PROBLEM]
    if problems:
        raise RunError(f"{counted(len(problems), 'problem')}: {', '.join(problems)}")


def _printed(folder: Path, *, quick: bool) -> list[Check]:
    """Print each check when it is done, and return all."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    console, found = Console(highlight=False), []
    for check in checks(folder, quick=quick):
        found.append(check)
        row = Table.grid(padding=(0, 1))
        row.add_column(width=7)
        row.add_column(width=10)
        row.add_column()
        row.add_row(f"[{COLOURS[check.status]}]{check.status}[/]", check.subject, check.finding)
        console.print(row)
        if check.advice:
            console.print(Padding(f"-> {check.advice}", (0, 0, 0, 19)), markup=False)
        sys.stdout.flush()
    return found
