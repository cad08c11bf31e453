"""TrialSpec runs of a switch point, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from pathlib import Path
from statistics import mean
from typing import Literal

from paceline.catalogue.parser import switch_plan
from paceline.catalogue.switch_timing import SwitchTiming
from paceline.checkpoint.fingerprint import model_in_short
from paceline.core.records import VersionEvaluated
from paceline.errors import RunError, UsageError
from paceline.experiments.runner.cell import GridSpec, RunSpec
from paceline.experiments.runner.ending import describe_crashes
from paceline.experiments.runner.folder import cells_of
from paceline.experiments.runner.pool import Display, run_cells
from paceline.experiments.switch_point.bisection import converged_accuracy
from paceline.protocols.found_for import FoundFor
from paceline.recording.run_folder import SavedRun
from paceline.recording.run_stats import count
from paceline.run.config import RunConfig
from paceline.worker.torch_utils import build_model

AccuracyOf = Literal["final", "converged"]


@dataclass(frozen=True)
class Trials:
    """Results of the runs of one setting.

    Attributes:
        fraction: share of the workload under the first protocol, in (0, 1]; 1 for the first protocol alone.
        accuracies: final or converged accuracy of each run, in [0, 1]; nan for a run that diverged.
        times_s: duration of each run on its clock, in seconds.
    """

    fraction: float
    accuracies: tuple[float, ...]
    times_s: tuple[float, ...]

    @property
    def diverged(self) -> int:
        """Number of runs that diverged."""
        return sum(map(isnan, self.accuracies))

    @property
    def mean_s(self) -> float:
        """Mean duration of the runs that did not diverge, in seconds; nan without any."""
        ended = [time_s for time_s, each in zip(self.times_s, self.accuracies, strict=True) if not isnan(each)]
        return mean(ended) if ended else nan


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """Common settings of all runs of a search.

    Attributes:
        config: configuration of a run of the first protocol alone; the others have another plan.
        first: text of the first protocol.
        then: text of the second protocol.
        accuracy: accuracy of a run that counts.
    """

    config: RunConfig
    first: str
    then: str
    accuracy: AccuracyOf = "final"

    def grid(self, fraction: float) -> GridSpec:
        """Return the runs that try a fraction."""
        plan = switch_plan(fraction, self.first, self.then)
        return GridSpec({self.name(fraction): replace(self.config, plan=plan)})

    def name(self, fraction: float) -> str:
        """Return the text of the plan."""
        return self.first if fraction == 1 else f"{self.first}@{100 * fraction:.12g}% >> {self.then}"

    def check(self) -> None:
        """Check the settings before the first run.

        Raises:
            UsageError: a setting is invalid.
        """
        job = self.config.job
        if job.eval_data is None:
            raise UsageError(f"job {job.name} has no data to measure an accuracy on; give it eval_data")
        if switch_plan(1.0, self.first, self.then) == switch_plan(1.0, self.then, self.first):
            raise UsageError(f"first and then are both {self.first}; give two different protocols")
        if self.accuracy == "converged" and self.config.evaluate_every is None:
            raise UsageError(
                "accuracy='converged' compares evaluations during a run; give evaluate_every, for example 'epochs=1'"
            )
        for fraction in (1.0, 0.5):
            self.grid(fraction).check()

    def timing(self, fraction: float, file: Path, seed: int) -> SwitchTiming:
        """Return the timing for a fraction, with the settings that it was found for."""
        job = self.config.job
        model = model_in_short(build_model(job, seed))
        found_for = FoundFor(
            file=str(file), job=job.name, model=model, batch_size=job.batch_size, workers=self.config.cluster.n
        )
        return SwitchTiming(fraction=fraction, first=self.first, then=self.then, found_for=found_for)


@dataclass(frozen=True, kw_only=True)
class TrialRunner:
    """Runner of the trial runs of a search."""

    trial: TrialSpec
    folder: Path
    display: Display
    processes: int

    def trials(self, fraction: float, seeds: Sequence[int]) -> Trials | None:
        """Return the results of the runs of a fraction; None if the user interrupted them."""
        cells = cells_of(self.folder, [self.trial.name(fraction)], seeds)
        report = run_cells(self.trial.grid(fraction), cells, self.display, self.processes)
        if report.interrupted:
            return None
        if report.crashes:
            crashes = {str(cell): crash for cell, crash in report.crashes.items()}
            raise RunError(describe_crashes(crashes, len(cells), self.folder))
        ends = [_end(cell, self.trial.accuracy) for cell in cells]
        accuracies, times_s = zip(*ends, strict=True)
        return Trials(fraction, accuracies, times_s)


def _end(cell: RunSpec, accuracy: AccuracyOf) -> tuple[float, float]:
    """Return the accuracy of a run, nan if it diverged, and its duration in seconds."""
    history = SavedRun(cell.folder).history
    stats = count(history)
    if stats.diverged:
        return nan, stats.time_s
    converged = None
    if accuracy == "converged":
        converged = converged_accuracy([each.metrics["accuracy"] for each in history.of(VersionEvaluated)])
    return stats.metrics["accuracy"] if converged is None else converged, stats.time_s
