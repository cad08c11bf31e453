"""One cell of a comparison: a protocol, a seed, and the folder of their run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.clusters.local import LocalCluster
from paceline.clusters.simulated import Cluster
from paceline.core.duration import Duration
from paceline.core.stop import Stop
from paceline.experiments.runner.ending import outcome_of
from paceline.jobs.job import Job
from paceline.protocols.protocol import Plan
from paceline.recording.callback import Callback
from paceline.recording.run_folder import ERROR, RUN
from paceline.run.config import RunConfig
from paceline.run.session import Session
from paceline.run.train import Result, train


@dataclass(frozen=True)
class RunSpec:
    """A run to be made.

    Attributes:
        name: of the protocol, as the user has written it.
        seed: of the run.
        folder: of the run.
    """

    name: str
    seed: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


@dataclass(frozen=True)
class GridSpec:
    """What all cells have in common, and the plan of every protocol."""

    job: Job
    plans: dict[str, Plan]
    cluster: Cluster | LocalCluster
    stop: Stop
    evaluate_every: Duration | None = None
    worker_timeout_s: float | None = None

    @property
    def workload(self) -> float | None:
        """Gradients of a whole run, if the stop fixes them."""
        plan = next(iter(self.plans.values()))
        return self.stop.workload(self._setting(plan).per_epoch)

    def check(self) -> None:
        """Refuse a plan that cannot run, before anything does."""
        for plan in self.plans.values():
            setting = self._setting(plan)
            setting.check()
            Session(setting)  # which refuses what the job's model and optimizer cannot do

    def _setting(self, plan: Plan) -> RunConfig:
        return RunConfig(self.job, plan, self.cluster, self.stop, 0, self.evaluate_every, self.worker_timeout_s)


def run_cell(task: GridSpec, cell: RunSpec, callbacks: Sequence[Callback]) -> Result:
    """Run a cell: from its last checkpoint if it was cut short, and from the beginning if it ended by a crash."""
    outcome = outcome_of(cell.folder)
    has_begun = (cell.folder / RUN).exists() and not (outcome is not None and outcome.is_crash)
    (cell.folder / ERROR).unlink(missing_ok=True)
    return train(
        task.job,
        protocol=task.plans[cell.name],
        cluster=task.cluster,
        stop=task.stop,
        seed=cell.seed,
        out=None if has_begun else cell.folder,
        overwrite=True,
        resume=cell.folder if has_begun else None,
        callbacks=callbacks,
        evaluate_every=task.evaluate_every,
        worker_timeout_s=task.worker_timeout_s,
        progress=False,  # the comparison shows it
    )
