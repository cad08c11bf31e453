"""What every engine does: carry commands out, report events. Nothing that decides lives here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from sys import float_info
from types import TracebackType
from typing import Any, Self

from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import (
    AbortRun,
    Accept,
    Apply,
    Arrival,
    Command,
    Compute,
    EndRun,
    Evaluate,
    Event,
    Interrupt,
    Outcome,
    RestartWorker,
    SetTimer,
    Step,
    UpdateApplied,
)
from paceline.engines.signals import Signals
from paceline.server.flat_buffers import FlatBuffers
from paceline.server.parameter_server import ParameterServer

Observer = Callable[[float, Event | None, Sequence[Command]], None]


class Engine(ABC):
    """Moves data and time for one run.

    A subclass carries out each command and hands in events in the order of their times, a `Timer` no earlier
    than it was asked for.
    """

    now: float = 0.0
    is_settled = True  # the server has the newest version; else it is not to be saved now

    def __init__(self) -> None:
        self.signals = Signals()
        self._applied: UpdateApplied | None = None  # to be told before anything else
        self._is_ready = True  # else nothing is carried out: a signal came before all workers were there

    def __enter__(self) -> Self:
        """Get ready to run."""
        self.signals.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Let go of whatever the run needed."""
        self.signals.remove()

    def abort_by_signal(self) -> AbortRun:
        """Return the event of the signal that was caught."""
        return AbortRun(self.now, Outcome.INTERRUPTED, f"interrupted by {self.signals.caught}")

    def report_step(self, command: Apply, step: Step | None) -> None:
        """Let the step of an update be the next event, if it was measured."""
        if step is not None:
            self._applied = UpdateApplied(self.now, command.version, step)

    @abstractmethod
    def resume_at(self, version: int, now: float) -> None:
        """Begin at this time, before `__enter__`, with what the server holds as this version."""

    @abstractmethod
    def next_event(self) -> Event:
        """Wait for the next event and return it."""

    @abstractmethod
    def compute(self, command: Compute) -> None:
        """Give a worker work."""

    @abstractmethod
    def interrupt(self, command: Interrupt) -> None:
        """Let a worker abandon its work."""

    @abstractmethod
    def replace(self, command: RestartWorker) -> None:
        """Give a worker up and start another one in its place, where that can be done; else it stays."""

    @abstractmethod
    def accept(self, command: Accept) -> None:
        """Add the gradient that has just arrived."""

    @abstractmethod
    def apply(self, command: Apply) -> None:
        """Make an update and publish it."""

    @abstractmethod
    def evaluate(self, command: Evaluate) -> None:
        """Measure a version; an `Evaluated` will tell."""

    @abstractmethod
    def wake(self, command: SetTimer) -> None:
        """Send a `Timer` at that moment."""

    def run(self, coordinator: Coordinator, observe: Observer | None = None, first: Event | None = None) -> EndRun:
        """Run to the end and return what ended it.

        Args:
            coordinator: decides.
            observe: sees the time, each event and the commands that answered it, once they are carried out.
            first: an event that comes before all others, instead of the beginning.
        """
        carry_out: dict[type[Any], Callable[[Any], None]] = {
            Compute: self.compute,
            Interrupt: self.interrupt,
            RestartWorker: self.replace,
            Accept: self.accept,
            Apply: self.apply,
            Evaluate: self.evaluate,
            SetTimer: self.wake,
        }
        self._coordinator = coordinator
        event = first
        commands = coordinator.begin(self.now) if first is None else coordinator.handle(first)
        while True:
            for command in commands:
                action = carry_out.get(type(command))  # the others are for the record
                if action is not None and self._is_ready:
                    action(command)
            if observe is not None:
                observe(self.now, event, commands)
            if coordinator.stopped:
                break
            event = self._following()
            commands = coordinator.handle(event)
        return next(command for command in commands if isinstance(command, EndRun))

    def _following(self) -> Event:
        applied, self._applied = self._applied, None
        if applied is not None:
            return applied
        return self.abort_by_signal() if self.signals.caught else self.next_event()


def compensated(
    arrival: Arrival,
    coordinator: Coordinator,
    server: ParameterServer,
    version: int,
    then: FlatBuffers,
    gradient: FlatBuffers,
) -> Arrival:
    """Let the compensators act on a gradient if it will be accepted; return its arrival with what they did.

    A correction that overflows makes a gradient that is not finite, and will be dropped as any other.

    Args:
        arrival: about to be told.
        coordinator: knows the compensators, and what will be accepted.
        server: holds the parameters of now.
        version: that the gradient was computed at.
        then: the parameters of that version.
        gradient: may be changed.
    """
    if not will_be_compensated(arrival, coordinator):
        return arrival
    compensators = coordinator.compensators
    staleness = coordinator.version - version
    done, finite = server.compensate(compensators, gradient, then, staleness, arrival.squared_norm)
    scales = [each.factor for each, by in zip(done, compensators, strict=True) if by.kind == "scale"]
    step_scale = max(prod(scales, start=1.0), float_info.min)  # a product may underflow, and weights may not be 0
    return arrival._replace(step_scale=step_scale, compensations=done, finite=finite)


def will_be_compensated(arrival: Arrival, coordinator: Coordinator) -> bool:
    """Return whether there are compensators now, and a gradient for them that will be accepted."""
    return bool(coordinator.compensators) and arrival.finite and coordinator.would_accept(arrival.worker, arrival.draw)
