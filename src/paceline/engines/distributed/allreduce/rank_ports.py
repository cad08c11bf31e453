"""Workers and parameters of a run without a server, as its loop sees them at one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Accept, Apply, Arrival, Compute, EndRun, Evaluate, Interrupt, RestartWorker
from paceline.engines.ports import Parameters, Workers
from paceline.engines.signals import Signals
from paceline.worker.replica import Replica
from paceline.worker.task_progress import TaskProgress


class RankTasks(Workers):
    """Tasks of all ranks, of which each rank carries out its own in the next iteration.

    Args:
        replica: replica that computes this rank's gradients.

    Attributes:
        tasks: task of each rank that has one.
        evaluation: version to evaluate before the next iteration; None for none.
    """

    def __init__(self, replica: Replica) -> None:
        self.tasks: dict[int, Compute] = {}
        self.evaluation: Evaluate | None = None
        self._replica = replica

    def meet(self, coordinator: Coordinator) -> None:
        """Note the coordinator, whose progress the replica shows to the user's code."""
        self._coordinator = coordinator

    def start(self, signals: Signals) -> bool:
        """Return True: all ranks have joined."""
        return True

    def compute(self, command: Compute) -> None:
        """Record the task of a rank."""
        self._replica.progress = TaskProgress(self._coordinator.version, self._coordinator.workload)
        self.tasks[command.worker] = command

    def interrupt(self, command: Interrupt) -> None:
        """Remove the task of a rank."""
        self.tasks.pop(command.worker, None)

    def restart(self, command: RestartWorker) -> None:
        """Keep the rank: only its launcher can restart it."""

    def evaluate(self, command: Evaluate) -> None:
        """Evaluate before the next iteration."""
        self.evaluation = command

    def accepted(self, command: Accept) -> None:
        """Do nothing: the gradient is part of the sum already."""

    def updating(self, command: Apply) -> None:
        """Do nothing, as `accepted`."""

    def on_commands(self) -> None:
        """Do nothing, as `accepted`."""

    def on_idle(self) -> None:
        """Do nothing, as `accepted`."""

    def save_after(self, draws: Mapping[int, int]) -> None:
        """Do nothing: each rank saves its state with that of the run."""

    def ended(self, command: EndRun) -> None:
        """Do nothing: every rank handles the same end."""

    def close(self, error: BaseException | None) -> None:
        """Do nothing: the ranks are processes of the launcher."""


class SummedParameters(Parameters):
    """Parameters that every rank holds, and steps with the sums of all gradients.

    Args:
        apply: function that applies the sum of an update.
    """

    not_finite = ""

    def __init__(self, apply: Callable[[Apply], None]) -> None:
        self._apply = apply

    def resume_at(self, version: int) -> None:
        """Do nothing: every rank gets the state of rank 0."""

    def begin(self) -> None:
        """Do nothing, as `resume_at`."""

    def assigned(self, command: Compute) -> None:
        """Do nothing: gradients are summed by the ranks."""

    def cancelled(self, command: Interrupt) -> None:
        """Do nothing, as `assigned`."""

    def lost(self, worker: int) -> None:
        """Do nothing, as `assigned`."""

    def arrived(self, arrival: Arrival, coordinator: Coordinator) -> Arrival:
        """Return the arrival: its gradient is corrected before the sum."""
        return arrival

    def accept(self, command: Accept) -> None:
        """Do nothing, as `assigned`."""

    def apply(self, command: Apply) -> None:
        """Apply the sum; the event of a measured step comes when the sum is complete."""
        self._apply(command)

    def gather(self) -> None:
        """Do nothing: every rank has them."""

    def accumulate(self) -> None:
        """Do nothing, as `assigned`."""

    def check(self, now: float) -> None:
        """Do nothing: each rank checks its own parameters."""

    def close(self) -> None:
        """Do nothing: the model has the parameters."""
