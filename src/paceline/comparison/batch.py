"""Runs that belong together, as many at a time as there are cores; those that are finished are not done again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from paceline.callbacks.progress import is_shown
from paceline.cluster import Cluster, LocalCluster, cores
from paceline.comparison.cells import Cell, Task
from paceline.comparison.ending import is_finished
from paceline.comparison.folder import Kind, RunsFolder, slug
from paceline.comparison.grid import Display, Report, run_here, run_in_processes
from paceline.comparison.progress import News, ProgressBars
from paceline.errors import UsageError
from paceline.job import Job


class Silent:
    """A display that shows nothing."""

    def plan(self, cells: int, finished: int) -> None:
        """Hear how many runs there are, and how many of them are finished already."""

    def begin(self, cell: Cell) -> None:
        """Hear that a run begins."""

    def show(self, cell: Cell, news: News) -> None:
        """Hear how a run is doing."""

    def end(self, cell: Cell, time_s: float | None, reason: str) -> None:
        """Hear that a run has ended."""


@contextmanager
def displayed(display: Display | None, progress: bool | None) -> Iterator[Display]:
    """Yield what shows the runs: a given display, else progress bars where progress is shown.

    Args:
        display: given by the caller.
        progress: as for `train`.
    """
    console = Console(stderr=True)
    if display is not None or not is_shown(progress, console):
        yield display or Silent()
        return
    with ProgressBars(console) as bars:
        yield bars


def run_cells(task: Task, cells: Sequence[Cell], display: Display, processes: int) -> Report:
    """Do the runs that are not finished, from where they were interrupted if they were."""
    waiting = [cell for cell in cells if not is_finished(cell.folder)]
    processes = min(processes, len(cells))  # not of those that wait: the last one is to be run as the first one was
    if processes > 1 and waiting:
        return run_in_processes(task, waiting, display, processes, threads=max(1, cores() // processes))
    return run_here(task, waiting, display)


def at_a_time(cluster: Cluster | LocalCluster, given: int | None) -> int:
    """Return how many processes do runs at a time on a cluster, None for as many as are good."""
    if given is not None and given < 1:
        raise UsageError(f"processes = {given}, expected a whole number >= 1")
    if isinstance(cluster, LocalCluster):
        if given not in (None, 1):
            raise UsageError(f"processes = {given}, but runs on a local cluster take real time; expected one at a time")
        return 1
    return given or (cores() if cluster.device == "cpu" else 1)


def open_folder(kind: Kind, out: str | Path | None, name: str, job: Job, asked: Mapping[str, object]) -> RunsFolder:
    """Return the folder of a question: the one that was given, or the first free one of runs/NAME-JOB-1, -2, ..."""
    if out is not None:
        return RunsFolder(kind, Path(out), asked)
    return RunsFolder.free(kind, f"{name}-{slug(job.name)}", asked)
