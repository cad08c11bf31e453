"""Ports of the loop of a run: its workers, its parameters and its clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import (
    Accept,
    Apply,
    Arrival,
    Compute,
    EndRun,
    Evaluate,
    Event,
    Interrupt,
    RestartWorker,
    SetTimer,
    Step,
)
from paceline.engines.signals import Signals


class Clock(ABC):
    """Time of a run, and its events in their order.

    Attributes:
        now: seconds since the run began, at the newest event or update.
    """

    now: float

    @abstractmethod
    def begin(self, signals: Signals) -> None:
        """Start the clock at `now`."""

    @abstractmethod
    def tick(self) -> None:
        """Set `now` to the present time."""

    @abstractmethod
    def add(self, event: Event) -> None:
        """Add an event of this moment."""

    @abstractmethod
    def set_timer(self, command: SetTimer) -> None:
        """Set a timer, of which the event comes no earlier than its time."""

    @abstractmethod
    def next_event(self, on_idle: Callable[[], None]) -> Event:
        """Return the next event, which is waited for.

        Args:
            on_idle: function that is called before a wait.
        """

    @abstractmethod
    def stop(self) -> None:
        """Release all resources."""


class Workers(ABC):
    """Workers of a run: they get tasks, and add what happens to the clock."""

    @abstractmethod
    def meet(self, coordinator: Coordinator) -> None:
        """Note the coordinator, of which some workers need to know what it expects."""

    @abstractmethod
    def start(self, signals: Signals) -> bool:
        """Start the workers, and wait until they are ready or a signal is caught; return whether they are ready."""

    @abstractmethod
    def compute(self, command: Compute) -> None:
        """Give a worker a task."""

    @abstractmethod
    def interrupt(self, command: Interrupt) -> None:
        """Cancel the task of a worker."""

    @abstractmethod
    def restart(self, command: RestartWorker) -> None:
        """Replace a worker by a new one, if workers can be started; else keep it."""

    @abstractmethod
    def evaluate(self, command: Evaluate) -> None:
        """Start to evaluate a version; an `Evaluated` event follows."""

    @abstractmethod
    def accepted(self, command: Accept) -> None:
        """Note that the gradient of a worker is accepted."""

    @abstractmethod
    def updating(self, command: Apply) -> None:
        """Note that an update is made now."""

    @abstractmethod
    def on_commands(self) -> None:
        """Note that the commands of an event are carried out and the run goes on."""

    @abstractmethod
    def on_idle(self) -> None:
        """Note that the server works ahead now, since there is no event."""

    @abstractmethod
    def ended(self, command: EndRun) -> None:
        """Note the end of the run, which its workers have to know."""

    @abstractmethod
    def save_after(self, draws: Mapping[int, int]) -> None:
        """Let each worker save the state that only it has, after this draw and before its next task."""

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """Release what the run has started.

        Args:
            error: reason if the run has failed.
        """


class Parameters(ABC):
    """Parameters of a run, and the gradients that change them."""

    @property
    @abstractmethod
    def not_finite(self) -> str:
        """Why the parameters are not finite; empty while they are."""

    @abstractmethod
    def resume_at(self, version: int) -> None:
        """Begin with what the server holds as this version."""

    @abstractmethod
    def begin(self) -> None:
        """Publish the first version."""

    @abstractmethod
    def assigned(self, command: Compute) -> None:
        """Note that a worker gets a task."""

    @abstractmethod
    def cancelled(self, command: Interrupt) -> None:
        """Note that the task of a worker is cancelled."""

    @abstractmethod
    def lost(self, worker: int) -> None:
        """Note that a worker is lost."""

    @abstractmethod
    def arrived(self, arrival: Arrival, coordinator: Coordinator) -> Arrival:
        """Return an arrival as the coordinator is to see it: with its gradient compensated, if it will be accepted."""

    @abstractmethod
    def accept(self, command: Accept) -> None:
        """Add the gradient that has just arrived to the pending update."""

    @abstractmethod
    def apply(self, command: Apply) -> Step | None:
        """Make an update and publish it; return the step if it is measured."""

    @abstractmethod
    def gather(self) -> None:
        """Bring the newest version, and the state that has made it, to the server of this process."""

    @abstractmethod
    def accumulate(self) -> None:
        """Do work of the pending update ahead, while there is nothing else to do."""

    @abstractmethod
    def check(self, now: float) -> None:
        """Check that nothing else has changed the parameters."""

    @abstractmethod
    def close(self) -> None:
        """Leave the trained parameters to the model, in memory of its own."""


class Follower(ABC):
    """Observer of a loop, of which another process repeats the events."""

    @abstractmethod
    def on_event(self, event: Event) -> None:
        """Note an event, before the coordinator handles it."""

    @abstractmethod
    def on_commands(self) -> None:
        """Note that the commands of an event are carried out, before the run is recorded."""

    @abstractmethod
    def before_wait(self) -> None:
        """Do work while there is nothing else to do."""
