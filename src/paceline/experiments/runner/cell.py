"""One cell of a grid of runs: a protocol, a seed, and the folder of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.stop import Stop
from paceline.engines.distributed import THIS_PROCESS
from paceline.engines.signals import holding_sigterm
from paceline.experiments.runner.ending import outcome_of
from paceline.recording.callback import Callback
from paceline.recording.run_folder import ERROR, RUN
from paceline.run.checkpointer import CheckpointPolicy
from paceline.run.config import RunConfig
from paceline.run.result import Result
from paceline.run.session import Session
from paceline.run.train import open_session, run_session


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


@dataclass(frozen=True)
class GridSpec:
    """Runs of one job on one cluster with several protocols and seeds.

    Attributes:
        configs: configuration of the runs of each protocol, by its name; a cell sets the seed and the folder.
    """

    configs: dict[str, RunConfig]

    @property
    def stop(self) -> Stop:
        """Stop of every run."""
        return self._first.stop

    @property
    def workload(self) -> float | None:
        """Number of gradients of a whole run; None if the stop does not fix it."""
        return self.stop.workload(self._first.per_epoch)

    @property
    def _first(self) -> RunConfig:
        return next(iter(self.configs.values()))

    def check(self) -> None:
        """Check every configuration before the first run.

        Raises:
            UsageError: a protocol cannot run with these settings.
        """
        for config in self.configs.values():
            config.check()
            Session(config)  # checks that the model and the optimizer of the job support the plan


@holding_sigterm()
def run_cell(grid: GridSpec, cell: RunSpec, callbacks: Sequence[Callback]) -> Result:
    """Train one cell: from its last checkpoint if it was interrupted, from the beginning if it crashed."""
    outcome = outcome_of(cell.folder)
    has_begun = (cell.folder / RUN).exists() and not (outcome is not None and outcome.is_crash)
    (cell.folder / ERROR).unlink(missing_ok=True)
    config = replace(grid.configs[cell.name], seed=cell.seed, folder=cell.folder)
    session, folder, resumption = open_session(
        config,
        THIS_PROCESS,
        out=None if has_begun else cell.folder,
        overwrite=True,
        resume=cell.folder if has_begun else None,
    )
    return run_session(session, folder, resumption, callbacks, CheckpointPolicy())
