"""The runs by which a switch point is tried, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import mean

from paceline.catalogue.parser import switch_plan
from paceline.catalogue.switch_timing import FoundFor, SwitchTiming
from paceline.checkpoint.fingerprint import model_in_short
from paceline.clusters.local import LocalCluster
from paceline.clusters.simulated import Cluster
from paceline.core.duration import Duration
from paceline.core.stop import Stop
from paceline.errors import RunError, UsageError
from paceline.experiments.runner.cell import GridSpec, RunSpec
from paceline.experiments.runner.ending import Crash
from paceline.experiments.runner.folder import cells_of
from paceline.experiments.runner.pool import Display, run_cells
from paceline.jobs.job import Job
from paceline.recording.run_folder import SavedRun
from paceline.recording.run_stats import count
from paceline.utils.wording import counted
from paceline.worker.torch_utils import build_model


@dataclass(frozen=True)
class Trials:
    """The runs of one setting.

    Attributes:
        fraction: of the workload under the first protocol; 1 for the first one alone.
        accuracies: at the end of each run, nan for one that has diverged.
        times_s: seconds of each run's clock until its end.
    """

    fraction: float
    accuracies: tuple[float, ...]
    times_s: tuple[float, ...]

    @property
    def diverged(self) -> int:
        """How many runs have diverged."""
        return sum(map(isnan, self.accuracies))

    @property
    def mean_s(self) -> float:
        """Mean seconds of the runs that came to their end; nan without any."""
        ended = [time_s for time_s, each in zip(self.times_s, self.accuracies, strict=True) if not isnan(each)]
        return mean(ended) if ended else nan


@dataclass(frozen=True)
class Trial:
    """What all runs of a search have in common; the attributes are the arguments of `search_switch`."""

    job: Job
    cluster: Cluster | LocalCluster
    stop: Stop
    first: str
    then: str
    evaluate_every: Duration | None
    worker_timeout_s: float | None

    def task(self, fraction: float) -> GridSpec:
        """Return what is run to try a fraction."""
        plan = switch_plan(fraction, self.first, self.then)
        plans = {self.name(fraction): plan}
        return GridSpec(self.job, plans, self.cluster, self.stop, self.evaluate_every, self.worker_timeout_s)

    def name(self, fraction: float) -> str:
        """Return the plan as it would be typed."""
        return self.first if fraction == 1 else f"{self.first}@{100 * fraction:.12g}% >> {self.then}"

    def check(self) -> None:
        """Refuse what cannot run."""
        if self.job.eval_data is None:
            raise UsageError(f"job {self.job.name} has nothing to measure an accuracy on; give it eval_data")
        if switch_plan(1.0, self.first, self.then) == switch_plan(1.0, self.then, self.first):
            raise UsageError(f"first and then are both {self.first}; expected two protocols to switch between")
        for fraction in (1.0, 0.5):
            self.task(fraction).check()

    def timing(self, fraction: float, file: Path, seed: int) -> SwitchTiming:
        """Return what was found, with the runs that it is for."""
        model = model_in_short(build_model(self.job, seed))
        found_for = FoundFor(str(file), self.job.name, model, self.job.batch_size, self.cluster.n)
        return SwitchTiming(fraction, self.first, self.then, found_for)


@dataclass(frozen=True)
class Trying:
    """Does the runs of a setting."""

    trial: Trial
    folder: Path
    display: Display
    processes: int

    def trials(self, fraction: float, seeds: Sequence[int]) -> Trials | None:
        """Return what the runs of a fraction came to; None if the user has ended them."""
        cells = cells_of(self.folder, [self.trial.name(fraction)], seeds)
        report = run_cells(self.trial.task(fraction), cells, self.display, self.processes)
        if report.interrupted:
            return None
        _refuse_crashes(report.crashes, len(cells), self.folder)
        ends = [_end(cell) for cell in cells]
        return Trials(fraction, *(tuple(column) for column in zip(*ends, strict=True)))


def _refuse_crashes(crashes: Mapping[RunSpec, Crash], runs: int, folder: Path) -> None:
    if crashes:
        told = "; ".join(f"{cell}: {crash}" for cell, crash in crashes.items())
        raise RunError(
            f"{len(crashes)} of {counted(runs, 'run')} failed: {told}; "
            f"ask the same again with out={str(folder)!r} to run only these again"
        )


def _end(cell: RunSpec) -> tuple[float, float]:
    """Return the final accuracy of a run, nan if it diverged, and its seconds."""
    figures = count(SavedRun(cell.folder).history)
    return nan if figures.diverged else figures.metrics["accuracy"], figures.time_s
