"""Runs the cells of a comparison: one after the other in this process, or several at a time in processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from paceline.clusters.devices import cores
from paceline.clusters.local import LocalCluster
from paceline.clusters.simulated import Cluster
from paceline.core.events import Outcome
from paceline.engines.local.engine import GRACE_S
from paceline.engines.signals import Signals
from paceline.errors import RunError, UsageError
from paceline.experiments.runner.cell import GridSpec, RunSpec, run_cell
from paceline.experiments.runner.ending import Crash, in_words, is_finished, write_crash
from paceline.experiments.runner.folder import FolderKind, RunsFolder, slug
from paceline.experiments.runner.progress import News, ProgressBars, Reporter
from paceline.jobs.job import Job
from paceline.processes.child_process import Launcher, ProcessSettings, describe_exit, init_child
from paceline.processes.shared_pickle import SharedPickle
from paceline.processes.unpicklable import pickled
from paceline.recording.callbacks.progress_line import is_shown, stderr_console
from paceline.utils.user_code import report_of

PRELOADED = [__name__, "torch._dynamo"]  # once for all: torch imports the latter with the first optimizer step


@runtime_checkable
class Display(Protocol):
    """Shows how the runs are doing, as `ProgressBars` does."""

    def plan(self, cells: int, finished: int) -> None:
        """Hear how many runs there are, and how many of them are finished already."""

    def begin(self, cell: RunSpec) -> None:
        """Hear that a run begins."""

    def show(self, cell: RunSpec, news: News) -> None:
        """Hear how a run is doing."""

    def end(self, cell: RunSpec, time_s: float | None, reason: str) -> None:
        """Hear that a run has ended."""


class RunEnding(NamedTuple):
    """A run has come to an end, or was told to stop."""

    time_s: float
    outcome: Outcome
    reason: str


class RunFailed(NamedTuple):
    """A run has crashed: it raised an error, its process died, or no worker was left."""

    message: str
    is_usage: bool = False
    details: str = ""


@dataclass
class Report:
    """What became of the runs, beside what their logs tell.

    Attributes:
        crashes: why runs crashed.
        interrupted: whether the user has ended it all.
    """

    crashes: dict[RunSpec, Crash] = field(default_factory=dict)
    interrupted: bool = False

    def take(self, cell: RunSpec, end: RunEnding | RunFailed, display: Display) -> None:
        """Take in how a run has ended.

        Raises:
            UsageError: the run cannot work as asked, so that the whole comparison cannot.
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


def run_here(task: GridSpec, cells: Sequence[RunSpec], display: Display) -> Report:
    """Run the cells in this process, one after the other."""
    report = Report()
    try:
        for cell in cells:
            display.begin(cell)
            reporter = Reporter(task.stop, task.workload, partial(display.show, cell))
            report.take(cell, _attempt(task, cell, reporter), display)
            if report.interrupted:
                break
    except KeyboardInterrupt:  # between two runs
        report.interrupted = True
    return report


def run_in_processes(
    task: GridSpec, cells: Sequence[RunSpec], display: Display, processes: int, threads: int
) -> Report:
    """Run the cells in as many processes at a time, each with as many threads of torch."""
    with _Pool(task, display, threads) as pool:
        waiting = deque(cells)
        try:
            while (waiting or pool.running) and not pool.signals.caught:
                while waiting and len(pool.running) < processes:
                    pool.start(waiting.popleft())
                pool.listen()
        except RunError:
            if not pool.signals.caught:  # which ends every process of a terminal
                raise
    pool.report.interrupted |= bool(pool.signals.caught)
    return pool.report


def _attempt(task: GridSpec, cell: RunSpec, reporter: Reporter) -> RunEnding | RunFailed:
    try:
        result = run_cell(task, cell, [reporter])
    except (UsageError, RunError) as error:
        return RunFailed(str(error), isinstance(error, UsageError), report_of(error))
    except Exception as error:  # of the job: the other runs go on
        return RunFailed(f"{type(error).__name__}: {error}", details=report_of(error))
    if result.stopped_by.is_crash:
        return RunFailed(result.reason)
    return RunEnding(result.time_s, result.stopped_by, in_words(task.stop, result.stopped_by, result.reason))


class _Pool:
    """The processes that are running, one a cell."""

    def __init__(self, task: GridSpec, display: Display, threads: int) -> None:
        self._display = display
        self._threads = threads
        self._launcher = Launcher(PRELOADED)
        self._surroundings = ProcessSettings.capture()
        self._parcel = _packed(task)
        self.report = Report()
        self.signals = Signals()
        self.running: dict[Connection, tuple[RunSpec, ForkServerProcess]] = {}

    def __enter__(self) -> _Pool:
        self.signals.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for _, process in self.running.values():
            process.terminate()  # which ends a run as Ctrl-C does: its log says so
        for connection, (_, process) in self.running.items():
            process.join(GRACE_S)
            process.kill()
            connection.close()
        self._parcel.close()
        self.signals.remove()

    def start(self, cell: RunSpec) -> None:
        ours, theirs = self._launcher.pipe(duplex=False)
        with closing(theirs):
            process = self._launcher.start(_serve, self._parcel, cell, self._threads, self._surroundings, theirs)
        self.running[ours] = cell, process
        self._display.begin(cell)

    def listen(self) -> None:
        for ready in wait([*self.running, self.signals.reader]):
            if isinstance(ready, Connection):
                self._read(ready)

    def _read(self, connection: Connection) -> None:
        cell, process = self.running[connection]
        try:
            message = connection.recv()
        except (EOFError, OSError):
            message = _death(process)
        if isinstance(message, News):
            self._display.show(cell, message)
            return
        del self.running[connection]
        connection.close()
        process.join()
        self.report.take(cell, message, self._display)


def _serve(
    parcel: SharedPickle, cell: RunSpec, threads: int, surroundings: ProcessSettings, connection: Connection
) -> None:
    init_child()
    surroundings.apply()
    torch.set_num_threads(threads)
    try:
        task: GridSpec = parcel.load()
    except UsageError as error:
        connection.send(RunFailed(str(error), is_usage=True))
        return
    except Exception as error:  # of an object that is made anew here, or of a module that it needs
        connection.send(RunFailed(f"{type(error).__name__}: {error}", details=report_of(error)))
        return
    connection.send(_attempt(task, cell, Reporter(task.stop, task.workload, connection.send)))


def _packed(task: GridSpec) -> SharedPickle:
    plans = {f"protocol {name}": plan for name, plan in task.plans.items()}
    parts = {**vars(task.job), **plans, "cluster": task.cluster}
    return pickled(task, parts, f"job {task.job.name} cannot be sent to other processes", ", or give processes=1")


def _death(process: ForkServerProcess) -> RunFailed:
    process.join(GRACE_S)
    code = process.exitcode
    return RunFailed(f"its process {'was ' if code is not None and code < 0 else ''}{describe_exit(code)}")


class Silent:
    """A display that shows nothing."""

    def plan(self, cells: int, finished: int) -> None:
        """Hear how many runs there are, and how many of them are finished already."""

    def begin(self, cell: RunSpec) -> None:
        """Hear that a run begins."""

    def show(self, cell: RunSpec, news: News) -> None:
        """Hear how a run is doing."""

    def end(self, cell: RunSpec, time_s: float | None, reason: str) -> None:
        """Hear that a run has ended."""


@contextmanager
def displayed(display: Display | None, progress: bool | None) -> Iterator[Display]:
    """Yield what shows the runs: a given display, else progress bars where progress is shown.

    Args:
        display: given by the caller.
        progress: as for `train`.
    """
    console = stderr_console()
    if display is not None or not is_shown(progress, console):
        yield display or Silent()
        return
    with ProgressBars(console) as bars:
        yield bars


def run_cells(task: GridSpec, cells: Sequence[RunSpec], display: Display, processes: int) -> Report:
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


def open_folder(
    kind: FolderKind, out: str | Path | None, name: str, job: Job, asked: Mapping[str, object]
) -> RunsFolder:
    """Return the folder of a question: the one that was given, or the first free one of runs/NAME-JOB-1, -2, ..."""
    if out is not None:
        return RunsFolder(kind, Path(out), asked)
    return RunsFolder.free(kind, f"{name}-{slug(job.name)}", asked)
