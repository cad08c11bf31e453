"""Engine interface: carries out the commands of a coordinator and reports events to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from paceline.coordinator.coordinator import Coordinator
from paceline.core import events
from paceline.engines.signals import Signals
from paceline.recording.metrics.network_counters import NetworkCounters

Observer = Callable[[float, events.Event | None, Sequence[events.Command]], None]


class Engine(ABC):
    """Engine of one run: moves data and time, and makes no decisions.

    A subclass carries out each command and returns events in the order of their times. A `Timer` comes no earlier than
    the time of its command.

    Attributes:
        now: seconds since the run began.
        is_settled: whether the server has the newest version, so that the run can be saved.
        signals: signals that were caught.
        network: counts of the connections of this process.
    """

    now: float = 0.0
    is_settled = True

    def __init__(self) -> None:
        self.signals = Signals()
        self.network = NetworkCounters()
        self._applied: events.UpdateApplied | None = None  # the next event, if there is one
        self._is_ready = True  # False after a signal before all workers were ready: no command is carried out

    def __enter__(self) -> Self:
        """Start to handle signals."""
        self.signals.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Release all resources of the run."""
        self._close(error)
        self.signals.remove()

    @abstractmethod
    def _close(self, error: BaseException | None) -> None:
        """Release what the run has started; `error` is the reason if the run has failed."""

    def abort_by_signal(self) -> events.AbortRun:
        """Return the event of the signal that was caught, or of the end that another thread has requested."""
        return self.signals.abort(self.now)

    def report_step(self, command: events.Apply, step: events.Step | None) -> None:
        """Make the step of an update the next event, if it was measured."""
        if step is not None:
            self._applied = events.UpdateApplied(self.now, command.version, step)

    def prepare_checkpoint(self) -> bool:
        """Let the workers save the state that only they have.

        Returns:
            Whether the run may be saved now; if not, the workers save after one of the next updates.
        """
        return True

    @abstractmethod
    def resume_at(self, version: int, now: float) -> None:
        """Start from what the server holds as this version, at this time; call it before `__enter__`."""

    @abstractmethod
    def next_event(self) -> events.Event:
        """Wait for the next event and return it."""

    @abstractmethod
    def compute(self, command: events.Compute) -> None:
        """Give a worker a task."""

    @abstractmethod
    def interrupt(self, command: events.Interrupt) -> None:
        """Cancel the task of a worker."""

    @abstractmethod
    def restart_worker(self, command: events.RestartWorker) -> None:
        """Replace a worker by a new one, if the engine can start workers; else keep it."""

    @abstractmethod
    def accept(self, command: events.Accept) -> None:
        """Add the gradient that has just arrived to the pending update."""

    @abstractmethod
    def apply(self, command: events.Apply) -> None:
        """Make an update and publish it."""

    @abstractmethod
    def evaluate(self, command: events.Evaluate) -> None:
        """Start to evaluate a version; an `Evaluated` event follows."""

    @abstractmethod
    def set_timer(self, command: events.SetTimer) -> None:
        """Set a timer; a `Timer` event follows at its time."""

    def run(
        self, coordinator: Coordinator, observe: Observer | None = None, first: events.Event | None = None
    ) -> events.EndRun:
        """Run to the end and return the last command.

        Args:
            coordinator: coordinator of the run.
            observe: callback with the time, each event and its commands, after they have been carried out.
            first: first event; None begins the run.
        """
        carry_out: dict[type[Any], Callable[[Any], None]] = {
            events.Compute: self.compute,
            events.Interrupt: self.interrupt,
            events.RestartWorker: self.restart_worker,
            events.Accept: self.accept,
            events.Apply: self.apply,
            events.Evaluate: self.evaluate,
            events.SetTimer: self.set_timer,
        }
        self._coordinator = coordinator
        event = first
        commands = coordinator.begin(self.now) if first is None else coordinator.handle(first)
        while True:
            for command in commands:
                action = carry_out.get(type(command))  # other commands are only recorded
                if action is not None and self._is_ready:
                    action(command)
            if observe is not None:
                observe(self.now, event, commands)
            if coordinator.stopped:
                break
            coordinator.prepare()
            event = self._following()
            commands = coordinator.handle(event)
        return next(command for command in commands if isinstance(command, events.EndRun))

    def _following(self) -> events.Event:
        applied, self._applied = self._applied, None
        if applied is not None:
            return applied
        return self.abort_by_signal() if self.signals.caught else self.next_event()
