"""One cell of a grid of runs: a protocol, a seed, and the folder of the run."""

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
from paceline.run.result import Result
from paceline.run.session import Session
from paceline.run.train import train


@dataclass(frozen=True)
class RunSpec:
    """Specification of one run.

    Attributes:
        name: name of the protocol as given by the user.
        seed: seed of the run, >= 0.
        folder: folder of the run.
    """

    name: str
    seed: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """Common settings of all runs of a grid; the attributes are the arguments of `train`, with a plan per protocol."""

    job: Job
    plans: dict[str, Plan]
    cluster: Cluster | LocalCluster
    stop: Stop
    evaluate_every: Duration | None = None
    worker_timeout_s: float | None = None

    @property
    def workload(self) -> float | None:
        """Number of gradients of a whole run; None if the stop does not fix it."""
        plan = next(iter(self.plans.values()))
        return self.stop.workload(self._config(plan).per_epoch)

    def check(self) -> None:
        """Check every plan before the first run.

        Raises:
            UsageError: a plan cannot run with these settings.
        """
        for plan in self.plans.values():
            config = self._config(plan)
            config.check()
            Session(config)  # checks that the model and the optimizer of the job support the plan

    def _config(self, plan: Plan) -> RunConfig:
        return RunConfig(
            job=self.job,
            plan=plan,
            cluster=self.cluster,
            stop=self.stop,
            seed=0,
            evaluate_every=self.evaluate_every,
            worker_timeout_s=self.worker_timeout_s,
        )


def run_cell(grid: GridSpec, cell: RunSpec, callbacks: Sequence[Callback]) -> Result:
    """Train one cell: from its last checkpoint if it was interrupted, from the beginning if it crashed."""
    outcome = outcome_of(cell.folder)
    has_begun = (cell.folder / RUN).exists() and not (outcome is not None and outcome.is_crash)
    (cell.folder / ERROR).unlink(missing_ok=True)
    return train(
        grid.job,
        protocol=grid.plans[cell.name],
        cluster=grid.cluster,
        stop=grid.stop,
        seed=cell.seed,
        out=None if has_begun else cell.folder,
        overwrite=True,
        resume=cell.folder if has_begun else None,
        callbacks=callbacks,
        evaluate_every=grid.evaluate_every,
        worker_timeout_s=grid.worker_timeout_s,
        progress=False,  # the caller shows it
    )
