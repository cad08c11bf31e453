"""From folders of runs to the files of a report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import RunError, UsageError
from paceline.recording.run_folder import REPORT, RUN, SavedRun, run_folders
from paceline.recording.validation import believed
from paceline.report.curves import groups
from paceline.report.figures import figure_class, write_figures
from paceline.report.page.page import page
from paceline.report.run_data import RunData, read_run
from paceline.utils.dict_diff import differences
from paceline.utils.files import replace_file, write_out

KEYS = ("job", "batch_size", "parameters", "identity")


def refuse_different_jobs(runs: Sequence[SavedRun]) -> None:
    """Refuse runs of different jobs.

    Protocols, clusters, seeds and stops may differ: they are what is compared.

    Raises:
        UsageError: two runs differ in their job; says in what.
    """
    for other in runs[1:]:
        first = runs[0]
        for name, ours, theirs in differences(_job(first), _job(other)):
            raise UsageError(
                f"{first.path} and {other.path} trained different jobs: {name} = {ours!r} and {theirs!r}; "
                "expected runs of one job"
            )


def _job(run: SavedRun) -> dict[str, Any]:
    return {key: run.configuration.get(key) for key in KEYS}


def write_report(folders: Sequence[Path], out: Path | None = None, figures: Path | None = None) -> Path:
    """Write the report of some runs of one job as one HTML file.

    Args:
        folders: of runs, or folders that have folders of runs below them.
        out: the file; report.html in the folder if only one is given, or else here.
        figures: folder to write every figure to, as PNG and SVG; not written without it.

    Returns:
        The file that was written.

    Raises:
        UsageError: a folder holds no run, the runs are of different jobs, or figures cannot be drawn.
        RunError: a log cannot be read, or the report not be written.
    """
    if figures is not None:
        figure_class()  # before anything takes time
    runs = read_runs(folders)
    with believed(" and ".join(map(str, folders))):
        drawn = groups(runs)
        text = page(runs, drawn)
    target = out or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        (replace_file if out is None else write_out)(target, text.encode())
    except OSError as error:
        raise RunError(f"cannot write {target}: {error.strerror}; give another file with out=") from error
    if figures is not None:
        write_figures(runs, drawn, figures)
    return target


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read all runs in and below some folders."""
    runs = [SavedRun(path) for folder in folders for path in _run_folders(folder)]
    refuse_different_jobs(runs)
    found = []
    for run, label in zip(runs, _labels(runs), strict=True):
        with believed(run.path):
            found.append(read_run(run, label))
    return found


def _run_folders(folder: Path) -> Iterator[Path]:
    if os.path.lexists(folder / RUN) or not os.path.isdir(folder):
        yield folder
        return
    below = run_folders(folder)
    if not below:
        raise UsageError(f"{folder} is not the folder of a run, nor are there any below it; expected one with {RUN}")
    yield from below


def _labels(runs: Sequence[SavedRun]) -> list[str]:
    """Name the runs by what tells them apart: protocol, seed, and folder where that is not enough."""
    names = [f"{run.configuration.get('protocol', '?')}, seed {run.configuration.get('seed', '?')}" for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({run.path})" for name, run in zip(names, runs, strict=True)]
