"""Report of runs: from their folders to one HTML file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.ddp_recording.recording import is_recording
from paceline.errors import UsageError
from paceline.recording.recorded_ddp_run import RecordedDDPRun
from paceline.recording.run_folder import REPORT, RUN, SavedRun, run_folders
from paceline.recording.validation import believed
from paceline.report.curves import groups
from paceline.report.figures import figure_class, write_figures
from paceline.report.page.page import page
from paceline.report.run_data import RunData, read_run
from paceline.utils.dict_diff import differences
from paceline.utils.files import in_unicode, replace_file, write_out, writing

KEYS = ("job", "batch_size", "parameters", "identity")


def check_same_job(runs: Sequence[SavedRun]) -> None:
    """Check that all runs trained the same job; protocols, clusters, seeds and stops may differ.

    Raises:
        UsageError: two runs have different jobs; the message names the difference.
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
    """Write the report of runs of one job as one HTML file.

    Args:
        folders: folders of runs or of DDP recordings, or parent folders of runs.
        out: file to write; by default report.html, in the folder if only one is given, else in the working directory.
        figures: folder to write each figure to as PNG and SVG; None to write no figures.

    Returns:
        the file that was written.

    Raises:
        UsageError: a folder has no run, the runs have different jobs, or matplotlib is not installed.
        RunError: a log cannot be read, or a file cannot be written.
    """
    if figures is not None:
        figure_class()  # fail before the long part
    runs = read_runs(folders)
    with believed(" and ".join(map(str, folders))):
        drawn = groups(runs)
        text = page(runs, drawn)
    target = out or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
    with writing(target, "; give another file with out="):
        target.parent.mkdir(parents=True, exist_ok=True)
        (replace_file if out is None else write_out)(target, in_unicode(text).encode())
    if figures is not None:
        write_figures(runs, drawn, figures)
    return target


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read all runs in and below these folders."""
    runs = [_open_run(path) for folder in folders for path in _run_folders(folder)]
    check_same_job(runs)
    found = []
    for run, label in zip(runs, _labels(runs), strict=True):
        with believed(run.path):
            found.append(read_run(run, label))
    return found


def _open_run(path: Path) -> SavedRun:
    return RecordedDDPRun(path) if is_recording(path) else SavedRun(path)


def _run_folders(folder: Path) -> Iterator[Path]:
    if os.path.lexists(folder / RUN) or not os.path.isdir(folder) or is_recording(folder):
        yield folder
        return
    below = run_folders(folder)
    if not below:
        raise UsageError(f"{folder} is not the folder of a run and has none below it; expected a folder with {RUN}")
    yield from below


def _labels(runs: Sequence[SavedRun]) -> list[str]:
    """Return distinct names of the runs: protocol and seed, and the folder where these are equal."""
    names = [_name(run.configuration) for run in runs]
    paths = [in_unicode(str(run.path)) for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({path})" for name, path in zip(names, paths, strict=True)]


def _name(configuration: Mapping[str, Any]) -> str:
    seed = f", seed {configuration['seed']}" if "seed" in configuration else ""
    return f"{configuration.get('protocol', '?')}{seed}"
