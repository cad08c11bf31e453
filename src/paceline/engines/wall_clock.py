"""What engines of real workers have in common: a clock, timers, and versions that are kept while they are read."""

from __future__ import annotations

import selectors
import time
from abc import abstractmethod
from collections import deque
from heapq import heappop, heappush
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch

from paceline.core.events import Accept, Apply, Arrival, Compute, Event, Interrupt, Lost, SetTimer, Timer
from paceline.engines.base import Engine, compensated
from paceline.server.flat_buffers import FlatBuffers
from paceline.server.parameter_server import ParameterServer
from paceline.server.version_store import VersionStore
from paceline.worker.parameter_guard import ParameterGuard
from paceline.worker.replica import GradientStats


class Peer:
    """A worker as its engine knows it.

    Attributes:
        is_ready: it can be given work, and is not known to be gone.
        working: what it was given, and has neither finished nor abandoned.
        waiting: what it will be given once it has abandoned that.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self.working: Compute | None = None
        self.waiting: Compute | None = None


P = TypeVar("P", bound=Peer)


class WallClockEngine(Engine, Generic[P]):
    """Gives work to real workers and reports what they do, when they do it.

    A worker's gradient is written only between its being given work and handing it in; the server reads it only
    between that and giving work again. A version is written before it is handed out, and its place is used
    again only when everybody has said that they are done with it.

    Args:
        server: owns the parameters.
        versions: where each of them lies.
        gradients: where that of each worker lies when it arrives.
        debug: whether a script that changes the server's model is noticed.
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
        self._events: deque[Event] = deque()
        self._read_by: dict[tuple[int, int], int] = {}  # version of a finished gradient, by worker and draw
        self._timers: list[float] = []
        self._selector = selectors.DefaultSelector()
        self._first_version = 0
        self._begun_s = 0.0
        self._threads = torch.get_num_threads()

    def __enter__(self) -> Self:
        """Publish the first version and wait until every worker is ready, or a signal comes."""
        super().__enter__()
        try:
            self._publish(self._first_version)
            self._snapshot_parameters()
            self._start()
        except BaseException as error:
            self._close(error)
            self.signals.remove()
            raise
        self._is_ready = not self.signals.caught
        self._selector.register(self.signals.reader, selectors.EVENT_READ)
        self._begun_s = time.monotonic() - self.now
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End every worker."""
        torch.set_num_threads(self._threads)
        self._close(error)
        super().__exit__(kind, error, where)

    def resume_at(self, version: int, now: float) -> None:
        """Begin at this time with what the server holds as this version."""
        self._first_version = version
        self.now = now

    # --- what a kind of worker needs ----------------------------------------------------------------------

    @abstractmethod
    def _start(self) -> None:
        """Start every worker and wait until all are ready, or a signal was caught."""

    @abstractmethod
    def _close(self, error: BaseException | None) -> None:
        """End every worker and let go of whatever was needed for them; `error` is why, if something went wrong."""

    @abstractmethod
    def _send(self, peer: P, command: Compute) -> None:
        """Tell a worker to compute."""

    @abstractmethod
    def _cancel_task(self, peer: P, command: Interrupt) -> None:
        """Tell a worker that computes to abandon its work."""

    @abstractmethod
    def _read(self, key: selectors.SelectorKey) -> None:
        """Make events of what there is to read."""

    def _publish(self, version: int) -> None:
        """Make what the server holds a version, in a place that nobody reads."""
        self._server.publish(self._versions.publish(version))

    def _get_ready(self) -> None:
        """Do ahead, while there is nothing else to do, what the next update would have to wait for."""

    def _use_idle_cores(self) -> None:
        """Let the server compute on cores that no worker uses, where it can be known."""

    # --- commands -----------------------------------------------------------------------------------------

    def compute(self, command: Compute) -> None:
        """Send the worker to the version's place."""
        self._server.flush()  # of its gradient too: it will write the next one there
        peer = self._workers[command.worker]
        if not peer.is_ready:
            return  # its loss is among the events that the coordinator has yet to hear of
        self._versions.acquire(command.version)
        if peer.working is None:
            self._give(peer, command)
        else:
            peer.waiting = command  # a worker that is slow to notice interrupts must not pile up versions

    def interrupt(self, command: Interrupt) -> None:
        """Let the worker abandon its work, or forget the work that it was about to be given."""
        peer = self._workers[command.worker]
        if not peer.is_ready:
            return
        if peer.waiting is not None:
            self._versions.release(peer.waiting.version)
            peer.waiting = None
        else:
            self._cancel_task(peer, command)

    def accept(self, command: Accept) -> None:
        """Take the gradient where the worker left it."""
        self._server.enqueue(self._gradients[command.worker], command.samples, command.step_scale)

    def apply(self, command: Apply) -> None:
        """Make the update and publish it."""
        self._use_idle_cores()
        step = self._server.apply(command)
        self._publish(command.version)
        self._snapshot_parameters()
        self.now = self._elapsed_s()
        self.report_step(command, step)

    def _snapshot_parameters(self) -> None:
        if self._guard is not None:
            self._guard.snapshot()

    def wake(self, command: SetTimer) -> None:
        """Send a timer at that moment."""
        heappush(self._timers, command.at_s)

    # --- events -------------------------------------------------------------------------------------------

    def next_event(self) -> Event:
        """Wait for a worker, a timer or a signal."""
        if self._guard is not None:  # callbacks have just had their say
            since = f"after version {self._versions.newest} was made, at {self.now:.3g} s"
            self._guard.check("the server", since)
        while not self._events:
            self._wait()
        event = self._events.popleft()
        self.now = self._elapsed_s()  # one after another, also those that came while an update was made
        event = event._replace(now=self.now)
        return self._compensated(event) if isinstance(event, Arrival) else event

    def _compensated(self, arrival: Arrival) -> Arrival:
        version = self._read_by.pop((arrival.worker, arrival.draw), None)
        if version is None:
            return arrival
        then, gradient = self._versions[version], self._gradients[arrival.worker]
        arrival = compensated(arrival, self._coordinator, self._server, version, then, gradient)
        self._versions.release(version)
        return arrival

    def _wait(self) -> None:
        ready = self._selector.select(timeout=0)
        is_due = bool(self._timers) and self._timers[0] <= self._elapsed_s()
        if not ready and not is_due:
            self._use_idle_cores()
            self._server.accumulate()  # while there is nothing else to do
            self._get_ready()
            ready = self._selector.select(max(0.0, self._timers[0] - self._elapsed_s()) if self._timers else None)
        for key, _ in ready:
            if key.fileobj == self.signals.reader:
                self._events.append(self.abort_by_signal())
            else:
                self._read(key)
        if is_due:  # after what was heard before: nobody is silent while the server is busy
            heappop(self._timers)
            self._events.append(Timer(self._elapsed_s()))

    def _arrived(self, worker: int, draw: int, measured: GradientStats, *, pull_s: float, push_s: float) -> None:
        """Report a gradient, and give its worker what has waited for that."""
        arrival = Arrival(
            now=self._elapsed_s(),
            worker=worker,
            draw=draw,
            loss=measured.loss,
            samples=measured.samples,
            squared_norm=measured.squared_norm,
            finite=measured.finite,
            pull_s=pull_s,
            compute_s=measured.compute_s,
            push_s=push_s,
            variance=measured.variance,
        )
        self._events.append(arrival)
        peer = self._workers[worker]
        assert peer.working is not None
        if peer.waiting is None:  # else it has crossed its interrupt, and is not wanted
            # Hold the version until the coordinator has heard of it.
            self._versions.acquire(peer.working.version)
            self._read_by[worker, peer.working.draw] = peer.working.version
        self._next(peer)

    def _next(self, peer: P) -> None:
        """Release the version that the worker has left behind, and send it what has waited for that."""
        assert peer.working is not None
        self._versions.release(peer.working.version)
        waiting, peer.working, peer.waiting = peer.waiting, None, None
        if waiting is not None:
            self._give(peer, waiting)

    def _give(self, peer: P, command: Compute) -> None:
        peer.working = command
        self._send(peer, command)

    def _lost(self, worker: int, peer: P, reason: str) -> None:
        """Report that a worker is gone, and release what it has read."""
        peer.is_ready = False
        for command in (peer.working, peer.waiting):
            if command is not None:
                self._versions.release(command.version)
        peer.working = peer.waiting = None
        self._events.append(Lost(self._elapsed_s(), worker, reason))

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s
