"""Loop of a run: events go to the coordinator, and its commands are carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, final

from paceline.coordinator.coordinator import Coordinator
from paceline.core import events
from paceline.engines.ports import Clock, Follower, Parameters, Workers
from paceline.engines.signals import Signals
from paceline.recording.metrics.network_counters import NetworkCounters
from paceline.utils.state_dict import HasState

Observer = Callable[[float, events.Event | None, Sequence[events.Command]], None]


@final
class RunLoop:
    """Loop of one run, which makes no decisions.

    Args:
        workers: workers, which add events to the clock.
        parameters: parameters and gradients.
        clock: time, and the events in their order.
        simulated: parts of a simulation, whose state is the whole state of the run beside coordinator and server.
        follower: observer that lets another process repeat the run; None for none.
        signals: record of the signals that this process gets; None for a new one.
        network: counts of the connections of this process; None for none.

    Attributes:
        is_settled: whether the server has the newest version, so that the run can be saved.
        signals: signals that were caught.
        network: counts of the connections of this process.
    """

    is_settled = True

    def __init__(
        self,
        workers: Workers,
        parameters: Parameters,
        clock: Clock,
        *,
        simulated: Sequence[HasState] = (),
        follower: Follower | None = None,
        signals: Signals | None = None,
        network: NetworkCounters | None = None,
    ) -> None:
        self.signals = signals or Signals()
        self.network = network or NetworkCounters()
        self._simulated = simulated
        self._follower = follower
        self._workers = workers
        self._parameters = parameters
        self._clock = clock
        self._applied: events.UpdateApplied | None = None  # the next event, if there is one
        self._is_ready = True  # False after a signal before all workers were ready: no command is carried out

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self._clock.now

    def __enter__(self) -> Self:
        """Handle signals, publish the first version, start the workers and start the clock."""
        self.signals.install()
        try:
            self._parameters.begin()
            self._is_ready = self._workers.start(self.signals)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        self._clock.begin(self.signals)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Release all resources of the run."""
        self._parameters.close()
        self._workers.close(error)
        self._clock.stop()
        self.signals.remove()

    def resume_at(self, version: int, now: float) -> None:
        """Start from what the server holds as this version, at this time; call it before `__enter__`."""
        self._parameters.resume_at(version)
        self._clock.now = now

    @property
    def is_simulated(self) -> bool:
        """Whether `state_dict` has the tasks under way, so that a resumed run goes on as if it had not stopped."""
        return bool(self._simulated)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the simulation."""
        return {name: value for part in self._simulated for name, value in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state of the same cluster."""
        for part in self._simulated:
            part.load_state_dict(state)

    def prepare_checkpoint(self) -> bool:
        """Let the workers save the state that only they have; return whether the run may be saved now."""
        self._workers.save_after(self._coordinator.accepted_draws)
        self._parameters.gather()
        return True

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
            events.Compute: self._compute,
            events.Interrupt: self._interrupt,
            events.RestartWorker: self._workers.restart,
            events.Accept: self._accept,
            events.Apply: self._apply,
            events.Evaluate: self._workers.evaluate,
            events.SetTimer: self._clock.set_timer,
        }
        self._coordinator = coordinator
        self._workers.meet(coordinator)
        event = first
        commands = coordinator.begin(self.now) if first is None else coordinator.handle(first)
        while True:
            for command in commands:
                action = carry_out.get(type(command))  # other commands are only recorded
                if action is not None and self._is_ready:
                    action(command)
            if self._follower is not None:
                self._follower.on_commands()
            if observe is not None:
                observe(self.now, event, commands)
            if coordinator.stopped:
                break
            self._workers.on_commands()
            coordinator.prepare()  # while the workers compute, so that the next decision takes less time
            event = self._next_event()
            if self._follower is not None:
                self._follower.on_event(event)
            commands = coordinator.handle(event)
        last = next(command for command in commands if isinstance(command, events.EndRun))
        self._workers.ended(last)
        return last

    def _compute(self, command: events.Compute) -> None:
        self._parameters.assigned(command)
        self._workers.compute(command)

    def _interrupt(self, command: events.Interrupt) -> None:
        self._parameters.cancelled(command)
        self._workers.interrupt(command)

    def _accept(self, command: events.Accept) -> None:
        self._workers.accepted(command)
        self._parameters.accept(command)

    def _apply(self, command: events.Apply) -> None:
        self._workers.updating(command)
        step = self._parameters.apply(command)
        self._clock.tick()
        if step is not None:
            self._applied = events.UpdateApplied(self.now, command.version, step)
        if self._parameters.not_finite:
            self._clock.add(events.AbortRun(self.now, events.Outcome.NOT_FINITE, self._parameters.not_finite))

    def _next_event(self) -> events.Event:
        applied, self._applied = self._applied, None
        if applied is not None:
            return applied
        if self.signals.caught:
            return self.signals.abort(self.now)
        self._parameters.check(self.now)  # the user's callbacks have just run
        event = self._clock.next_event(self._use_idle_time)
        match event:
            case events.Arrival():
                return self._parameters.arrived(event, self._coordinator)
            case events.Lost(worker=worker):
                self._parameters.lost(worker)
        return event

    def _use_idle_time(self) -> None:
        if self._follower is not None:
            self._follower.before_wait()
        self._workers.on_idle()
        self._parameters.accumulate()
