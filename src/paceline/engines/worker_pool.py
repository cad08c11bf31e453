"""Worker pool engine: workers in other processes compute gradients for a parameter server in this process."""

from __future__ import annotations

import selectors
from abc import abstractmethod
from collections.abc import Container
from typing import Any, Generic, Self, TypeVar

from paceline.core.events import AbortRun, Accept, Apply, Arrival, Compute, Event, Interrupt, Lost, Outcome
from paceline.engines.server_side import compensated
from paceline.engines.wall_clock import WallClockEngine
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.tensors.version_store import VersionStore
from paceline.worker.parameter_guard import ParameterGuard
from paceline.worker.replica import GradientStats, TaskProgress


class PoolWorker:
    """State of a worker process at its engine.

    Attributes:
        is_ready: whether the worker can be given a task.
        working: task that the worker has neither completed nor cancelled; None if it is idle.
        waiting: task that it will be given after the cancelled one.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self.working: Compute | None = None
        self.waiting: Compute | None = None


P = TypeVar("P", bound=PoolWorker)


class WorkerPoolEngine(WallClockEngine, Generic[P]):
    """Base of engines with a parameter server and a pool of worker processes.

    A worker writes its gradient only between a task's start and its end; the server reads the gradient only before
    it gives the worker the next task. A version is written before it is published, and its storage is reused only
    when all its readers have released it.

    Args:
        server: server of the parameters.
        versions: storage of the versions.
        gradients: storage for the gradient of each worker.
        debug: whether a script that changes the server's model is detected.
    """

    def __init__(
        self, server: ParameterServer, versions: VersionStore, gradients: list[FlatBuffers], *, debug: bool = False
    ) -> None:
        super().__init__()
        self._server = server
        self._versions = versions
        self._gradients = gradients
        self._guard = ParameterGuard.for_model(server.model) if debug else None
        self._workers: dict[int, P] = {}
        self._read_by: dict[tuple[int, int], int] = {}  # version of a complete gradient, by worker and draw
        self._selector = selectors.DefaultSelector()
        self._first_version = 0
        self._saved_draws: dict[int, int] = {}  # newest accepted draw of each worker in the newest checkpoint

    def __enter__(self) -> Self:
        """Publish the first version and wait until all workers are ready, or until a signal is caught."""
        super().__enter__()
        self._is_ready = not self.signals.caught
        self._selector.register(self.signals.reader, selectors.EVENT_READ)
        return self

    def _start(self) -> None:
        self._publish(self._first_version)
        self._snapshot_parameters()
        self._start_workers()

    def resume_at(self, version: int, now: float) -> None:
        """Start at this time from what the server holds as this version."""
        super().resume_at(version, now)
        self._first_version = version

    def prepare_checkpoint(self) -> bool:
        """Let each worker save, before its next task, the state after its newest accepted draw of now."""
        self._saved_draws = self._coordinator.accepted_draws
        return True

    # --- implemented for each kind of worker process ------------------------------------------------------

    @abstractmethod
    def _start_workers(self) -> None:
        """Start all workers and wait until they are ready, or until a signal is caught."""

    @abstractmethod
    def _send(self, worker: P, command: Compute) -> None:
        """Send a task to a worker."""

    @abstractmethod
    def _cancel_task(self, worker: P, command: Interrupt) -> None:
        """Ask a worker to cancel its task."""

    @abstractmethod
    def _read(self, key: selectors.SelectorKey) -> None:
        """Turn what can be read into events."""

    def _publish(self, version: int) -> None:
        """Publish what the server holds as a version, in storage that no worker reads."""
        self._server.publish(self._versions.publish(version))

    def _use_idle_cores(self) -> None:
        """Let the server compute on cores that no worker uses, if they are known."""

    # --- commands -----------------------------------------------------------------------------------------

    def compute(self, command: Compute) -> None:
        """Give a worker a task."""
        self._server.flush()  # the worker's next gradient overwrites the previous one
        worker = self._workers.get(command.worker)
        if worker is None or not worker.is_ready:
            return  # its loss is an event that the coordinator has not handled yet
        self._versions.acquire(command.version)
        if worker.working is None:
            self._assign(worker, command)
        else:
            worker.waiting = command  # only the newest: a worker that cancels slowly must not keep many versions

    def interrupt(self, command: Interrupt) -> None:
        """Cancel the task of a worker, or the task that waits for it."""
        worker = self._workers[command.worker]
        if not worker.is_ready:
            return
        if worker.waiting is not None:
            self._versions.release(worker.waiting.version)
            worker.waiting = None
        else:
            self._cancel_task(worker, command)

    def accept(self, command: Accept) -> None:
        """Add the gradient of a worker to the pending update."""
        gradient = self._gradients[command.worker]
        self._server.enqueue(gradient, command.samples, command.step_scale, command.worker)

    def apply(self, command: Apply) -> None:
        """Make the update and publish it."""
        self._use_idle_cores()
        step = self._server.apply(command, self._versions.publish(command.version))
        self._snapshot_parameters()
        self.now = self._elapsed_s()
        self.report_step(command, step)
        if self._server.not_finite:
            self._events.append(AbortRun(self.now, Outcome.NOT_FINITE, self._server.not_finite))

    def _snapshot_parameters(self) -> None:
        if self._guard is not None:
            self._guard.snapshot()

    # --- events -------------------------------------------------------------------------------------------

    def next_event(self) -> Event:
        """Wait for a worker, a timer or a signal."""
        if self._guard is not None:  # the user's callbacks have just run
            since = f"after version {self._versions.newest} was made, at {self.now:.3g} s"
            self._guard.check("the server", since)
        event = super().next_event()
        self.now = self._elapsed_s()  # in order, also for events that came during an update
        event = event._replace(now=self.now)
        return self._compensated(event) if isinstance(event, Arrival) else event

    def _compensated(self, arrival: Arrival) -> Arrival:
        version = self._read_by.pop((arrival.worker, arrival.draw), None)
        if version is None:
            return arrival
        then, gradient = self._versions[version], self._gradients[arrival.worker]
        arrival = compensated(
            arrival=arrival,
            coordinator=self._coordinator,
            server=self._server,
            version=version,
            then=then,
            gradient=gradient,
        )
        self._versions.release(version)
        return arrival

    def _advance(self) -> None:
        ready = self._selector.select(timeout=0)
        now = self._elapsed_s()
        is_due = bool(self._timers) and self._timers[0] <= now
        if not ready and not is_due:
            self._use_idle_cores()
            self._server.accumulate()  # while there is nothing else to do
            ready = self._selector.select(max(0.0, self._timers[0] - self._elapsed_s()) if self._timers else None)
        for key, _ in ready:
            if key.fileobj == self.signals.reader:
                self._events.append(self.abort_by_signal())
            else:
                self._read(key)
        if is_due:  # after the messages: no worker counts as silent while the server is busy
            self._add_timers(self._timers[0], now)

    def _on_gradient(
        self, worker: int, draw: int, stats: GradientStats, missing: Container[int], **seconds: Any
    ) -> None:
        """Report a gradient, or its notice, and give its worker the waiting task.

        Args:
            worker: number of the worker.
            draw: number of its task.
            stats: scalars of the gradient.
            missing: parameters that have none.
            seconds: fields of `Arrival` that the engine has measured.
        """
        self._gradients[worker].receive(missing)
        self._events.append(Arrival(self._elapsed_s(), worker, draw, **seconds, **stats._asdict()))
        state = self._workers[worker]
        assert state.working is not None
        if state.waiting is None:  # else the gradient crossed its interrupt, and will not be used
            # Keep the version until the coordinator has handled the arrival.
            self._versions.acquire(state.working.version)
            self._read_by[worker, state.working.draw] = state.working.version
        self._on_idle(state)

    def _on_idle(self, worker: P) -> None:
        """Release the version that a worker no longer reads, and give it the waiting task."""
        assert worker.working is not None
        self._versions.release(worker.working.version)
        worker.working = None
        waiting, worker.waiting = worker.waiting, None
        if waiting is not None:
            self._assign(worker, waiting)

    def _progress(self, command: Compute, last: str = "", staleness: int = 0) -> TaskProgress:
        return TaskProgress.of(command, last, staleness, self._saved_draws.get(command.worker, 0))

    def _assign(self, worker: P, command: Compute) -> None:
        worker.working = command
        self._send(worker, command)

    def _on_lost(self, number: int, worker: P, reason: str) -> None:
        """Report that a worker is lost, and release the versions that it has read."""
        worker.is_ready = False
        for command in (worker.working, worker.waiting):
            if command is not None:
                self._versions.release(command.version)
        worker.working = worker.waiting = None
        self._events.append(Lost(self._elapsed_s(), number, reason))
