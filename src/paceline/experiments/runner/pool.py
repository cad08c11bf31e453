"""Execution of a grid of runs: one after another in this process, or in parallel worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from rich.console import Console

from paceline.clusters.devices import cores
from paceline.clusters.local import LocalCluster
from paceline.clusters.simulated import Cluster
from paceline.core.events import Outcome
from paceline.engines.local.workers import GRACE_S
from paceline.engines.signals import Signals
from paceline.errors import RunError, UsageError
from paceline.experiments.runner.cell import GridSpec, RunSpec, run_cell
from paceline.experiments.runner.ending import Crash, describe_end, is_finished, write_crash
from paceline.experiments.runner.folder import FolderKind, RunsFolder, slug
from paceline.experiments.runner.progress import ProgressBars, ProgressReporter, RunProgress
from paceline.jobs.job import Job
from paceline.processes.child_process import Launcher, ProcessSettings, describe_exit, init_child
from paceline.processes.shared_pickle import SharedPickle
from paceline.processes.unpicklable import pickled
from paceline.recording.callbacks.progress_line import is_shown, stderr_console
from paceline.utils.user_code import report_of

PRELOADED = [__name__, "torch._dynamo"]  # in the fork server: torch imports the latter at the first optimizer step


@runtime_checkable
class Display(Protocol):
    """Display of the progress of several runs, such as `ProgressBars`."""

    def plan(self, cells: int, finished: int) -> None:
        """Set the number of runs, and how many of them have finished before."""

    def begin(self, cell: RunSpec) -> None:
        """Show that a run begins."""

    def show(self, cell: RunSpec, progress: RunProgress) -> None:
        """Show the progress of a run."""

    def end(self, cell: RunSpec, time_s: float | None, reason: str) -> None:
        """Show that a run has ended; the time on its clock is None if it crashed."""


class RunEnding(NamedTuple):
    """End of a run without a crash, possibly by an interrupt."""

    time_s: float
    outcome: Outcome
    reason: str


class RunFailed(NamedTuple):
    """Crash of a run: an exception, the end of its process, or the loss of all workers."""

    message: str
    is_usage: bool = False
    details: str = ""


@dataclass
class Report:
    """Report on the runs, in addition to their logs.

    Attributes:
        crashes: reasons of crashed runs, by run.
        interrupted: whether the user interrupted the runs.
    """

    crashes: dict[RunSpec, Crash] = field(default_factory=dict)
    interrupted: bool = False

    def add(self, cell: RunSpec, end: RunEnding | RunFailed, display: Display) -> None:
        """Add the end of a run.

        Raises:
            UsageError: an argument of the run is invalid, and so the whole comparison is.
        """
        if isinstance(end, RunEnding):
            display.end(cell, end.time_s, end.reason)
            self.interrupted |= end.outcome is Outcome.INTERRUPTED
            return
        if end.is_usage:
            raise UsageError(end.message)
        crash = write_crash(cell.folder, end.message, end.details)
        display.end(cell, None, f"failed: {crash}")
        self.crashes[cell] = crash


def run_here(grid: GridSpec, cells: Sequence[RunSpec], display: Display) -> Report:
    """Run the cells in this process, one after another."""
    report = Report()
    try:
        for cell in cells:
            display.begin(cell)
            reporter = ProgressReporter(grid.stop, grid.workload, partial(display.show, cell))
            report.add(cell, _attempt(grid, cell, reporter), display)
            if report.interrupted:
                break
    except KeyboardInterrupt:  # between two runs
        report.interrupted = True
    return report


def run_in_processes(
    grid: GridSpec, cells: Sequence[RunSpec], display: Display, processes: int, threads: int
) -> Report:
    """Run the cells in parallel processes, each with a number of torch threads."""
    with _Pool(grid, display, threads) as pool:
        waiting = deque(cells)
        try:
            while (waiting or pool.running) and not pool.signals.caught:
                while waiting and len(pool.running) < processes:
                    pool.start(waiting.popleft())
                pool.wait()
        except RunError:
            if not pool.signals.caught:  # a signal from a terminal ends every process
                raise
    pool.report.interrupted |= bool(pool.signals.caught)
    return pool.report


def _attempt(grid: GridSpec, cell: RunSpec, reporter: ProgressReporter) -> RunEnding | RunFailed:
    try:
        result = run_cell(grid, cell, [reporter])
    except Exception as error:  # also from the job: the other runs continue
        return _failure(error)
    if result.stopped_by.is_crash:
        return RunFailed(result.reason)
    return RunEnding(result.time_s, result.stopped_by, describe_end(grid.stop, result.stopped_by, result.reason))


def _failure(error: Exception) -> RunFailed:
    is_ours = isinstance(error, UsageError | RunError)
    message = str(error) if is_ours else f"{type(error).__name__}: {error}"
    return RunFailed(message, isinstance(error, UsageError), report_of(error))


class _Pool:
    """Pool of worker processes, one per running cell."""

    def __init__(self, grid: GridSpec, display: Display, threads: int) -> None:
        self._display = display
        self._threads = threads
        self._launcher = Launcher(PRELOADED)
        self._settings = ProcessSettings.capture()
        self._shared = _shared_grid(grid)
        self.report = Report()
        self.signals = Signals()
        self.running: dict[Connection, tuple[RunSpec, ForkServerProcess]] = {}

    def __enter__(self) -> _Pool:
        self.signals.install()
        return self

    def __exit__(self, *error: object) -> None:
        for _, process in self.running.values():
            process.terminate()  # ends the run like Ctrl-C, with an entry in its log
        for connection, (_, process) in self.running.items():
            process.join(GRACE_S)
            process.kill()
            connection.close()
        self._shared.close()
        self.signals.remove()

    def start(self, cell: RunSpec) -> None:
        ours, theirs = self._launcher.pipe(duplex=False)
        arguments = _RunArguments(
            shared=self._shared, cell=cell, threads=self._threads, settings=self._settings, connection=theirs
        )
        with closing(theirs):  # else the pipe of a process that has ended would stay open
            process = self._launcher.start(_serve, arguments)
        self.running[ours] = cell, process
        self._display.begin(cell)

    def wait(self) -> None:
        for ready in wait([*self.running, self.signals.reader]):  # a signal ends the wait
            if isinstance(ready, Connection):
                self._read(ready)

    def _read(self, connection: Connection) -> None:
        cell, process = self.running[connection]
        try:
            message = connection.recv()
        except (EOFError, OSError):
            message = _exit_failure(process)
        if isinstance(message, RunProgress):
            self._display.show(cell, message)
            return
        del self.running[connection]
        connection.close()
        process.join()
        self.report.add(cell, message, self._display)


@dataclass(frozen=True, kw_only=True)
class _RunArguments:
    """Arguments of the process of a run."""

    shared: SharedPickle
    cell: RunSpec
    threads: int
    settings: ProcessSettings
    connection: Connection


def _serve(arguments: _RunArguments) -> None:
    connection = arguments.connection
    init_child()
    arguments.settings.apply()
    torch.set_num_threads(arguments.threads)
    try:
        grid: GridSpec = arguments.shared.load()
    except Exception as error:  # from unpickling an object, or from the import of its module
        connection.send(_failure(error))
        return
    connection.send(_attempt(grid, arguments.cell, ProgressReporter(grid.stop, grid.workload, connection.send)))


def _shared_grid(grid: GridSpec) -> SharedPickle:
    plans = {f"protocol {name}": config.plan for name, config in grid.configs.items()}
    config = next(iter(grid.configs.values()))
    parts = {**vars(config.job), **plans, "cluster": config.cluster}
    return pickled(grid, parts, f"job {config.job.name} cannot be sent to other processes", ", or give processes=1")


def _exit_failure(process: ForkServerProcess) -> RunFailed:
    process.join(GRACE_S)
    code = process.exitcode
    return RunFailed(f"its process {'was ' if code is not None and code < 0 else ''}{describe_exit(code)}")


@contextmanager
def displayed(display: Display | None, progress: bool | None) -> Iterator[Display]:
    """Yield the display of the runs: a given one, progress bars, or none.

    Args:
        display: display of the caller; None for progress bars.
        progress: whether to show progress bars; None for on a terminal and in a notebook only.
    """
    console = stderr_console()
    if display is not None or not is_shown(progress, console):
        yield display or ProgressBars(Console(quiet=True))
        return
    with ProgressBars(console) as bars:
        yield bars


def run_cells(grid: GridSpec, cells: Sequence[RunSpec], display: Display, processes: int) -> Report:
    """Train the cells that are not finished; interrupted ones are resumed."""
    waiting = [cell for cell in cells if not is_finished(cell.folder)]
    processes = min(processes, len(cells))  # of all cells, so that the last one runs with the same threads as the first
    if processes > 1 and waiting:
        return run_in_processes(grid, waiting, display, processes, threads=max(1, cores() // processes))
    return run_here(grid, waiting, display)


def at_a_time(cluster: Cluster | LocalCluster, given: int | None) -> int:
    """Return the number of parallel runs on a cluster: the given one, or the default for None."""
    if given is not None and given < 1:
        raise UsageError(f"processes={given}, expected a whole number >= 1")
    if isinstance(cluster, LocalCluster):
        if given not in (None, 1):
            raise UsageError(f"processes={given}, but runs on a local cluster take real time; give processes=1")
        return 1
    return given or (cores() if cluster.device == "cpu" else 1)


def open_folder(
    kind: FolderKind, out: str | Path | None, name: str, job: Job, request: Mapping[str, object]
) -> RunsFolder:
    """Return the folder of a request: the given one, or the first free one of runs/NAME-JOB-1, -2, ..."""
    if out is not None:
        return RunsFolder(kind, Path(out), request)
    return RunsFolder.free(kind, f"{name}-{slug(job.name)}", request)
