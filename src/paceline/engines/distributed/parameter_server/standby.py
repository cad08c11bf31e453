"""Standby: a process that holds the state of rank 0, and goes on with the run if rank 0 is lost."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from paceline.clusters.rank_checks import host_and_port
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import (
    Accept,
    Apply,
    Arrival,
    Command,
    Compute,
    EndRun,
    Evaluate,
    Event,
    Interrupt,
    Restarted,
    RestartWorker,
    SetTimer,
    Step,
    UpdateApplied,
)
from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.parameter_server.remote_workers import RemoteWorkers
from paceline.engines.distributed.parameter_server.shard_clients import ShardClients
from paceline.engines.distributed.parameter_server.succession import Succession
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.rendezvous import join_rank_0
from paceline.engines.distributed.rendezvous.session import ClientSession, describe_process
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.encoded import at_most, decoded
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.standby_messages import StandbyListens, UpdateReceived, split_events
from paceline.engines.loop import Observer, RunLoop
from paceline.engines.ports import Clock, Parameters, Workers
from paceline.engines.signals import Signals, holding_sigterm
from paceline.errors import RunError
from paceline.recording.metrics.network_counters import NetworkCounters
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class FollowedRunEnded(SystemExit):
    """Exit of the standby, because rank 0 has ended the run, or because this process leaves it."""


class _RankZeroLost(Exception):  # noqa: N818  # the reason to take over
    pass


class _FollowedWorkers(Workers, Clock):
    """Workers of rank 0 as its standby sees them: events that have come, and nothing to do.

    Args:
        read: function that waits for a message of rank 0, and returns its events.
    """

    def __init__(self, read: Callable[[], Iterator[Event]]) -> None:
        self.now = 0.0
        self._read = read
        self._events: Iterator[Event] = iter(())

    def next_event(self, on_idle: Callable[[], None] = lambda: None) -> Event:
        """Return the next event that rank 0 has handled."""
        while (event := next(self._events, None)) is None:
            self._events = self._read()
        self.now = event.now
        return event

    def begin(self, signals: Signals) -> None:
        """Do nothing: time passes at rank 0."""

    def tick(self) -> None:
        """Do nothing, as `begin`."""

    def add(self, event: Event) -> None:
        """Do nothing: events come from rank 0."""

    def set_timer(self, command: SetTimer) -> None:
        """Do nothing: the timers ring at rank 0."""

    def stop(self) -> None:
        """Do nothing, as `begin`."""

    def meet(self, coordinator: Coordinator) -> None:
        """Do nothing: rank 0 gives its workers their tasks."""

    def start(self, signals: Signals) -> bool:
        """Return True, as `meet`."""
        return True

    def compute(self, command: Compute) -> None:
        """Do nothing, as `meet`."""

    def interrupt(self, command: Interrupt) -> None:
        """Do nothing, as `meet`."""

    def restart(self, command: RestartWorker) -> None:
        """Do nothing, as `meet`."""

    def evaluate(self, command: Evaluate) -> None:
        """Do nothing: the result comes from rank 0."""

    def accepted(self, command: Accept) -> None:
        """Do nothing, as `meet`."""

    def updating(self, command: Apply) -> None:
        """Do nothing, as `meet`."""

    def on_commands(self) -> None:
        """Do nothing, as `meet`."""

    def on_idle(self) -> None:
        """Do nothing, as `meet`."""

    def save_after(self, draws: Mapping[int, int]) -> None:
        """Do nothing, as `meet`."""

    def ended(self, command: EndRun) -> None:
        """Do nothing: rank 0 tells the workers."""

    def close(self, error: BaseException | None) -> None:
        """Do nothing, as `meet`."""


class _FollowedParameters(Parameters):
    """Parameters of rank 0 as its standby makes them: the same updates, from the mean gradients that rank 0 sends.

    Args:
        server: server of the parameters.

    Attributes:
        mean: mean gradient of the next update; None until it has come.
        step: step of the newest update, if it was measured.
    """

    not_finite = ""

    def __init__(self, server: ParameterServer) -> None:
        self._server = server
        self.mean: FlatBuffers | None = None
        self.step: Step | None = None

    def apply(self, command: Apply) -> None:
        """Make the update of rank 0; the event of a measured step comes from there."""
        if command.is_skipped:
            self.step = self._server.apply(command)
            return
        if self.mean is None:
            raise RunError(
                f"the standby would make update {command.version}, which rank 0 has not made: it began with another "
                "state; give both the same folder to resume"
            )
        mean, self.mean = self.mean, None
        self._server.enqueue(mean, 1)
        self.step = self._server.apply(command)

    def resume_at(self, version: int) -> None:
        """Do nothing: the server holds the version."""

    def begin(self) -> None:
        """Do nothing, as `resume_at`."""

    def assigned(self, command: Compute) -> None:
        """Do nothing: gradients are at rank 0."""

    def cancelled(self, command: Interrupt) -> None:
        """Do nothing, as `assigned`."""

    def lost(self, worker: int) -> None:
        """Do nothing, as `assigned`."""

    def arrived(self, arrival: Arrival, coordinator: Coordinator) -> Arrival:
        """Return the arrival, which rank 0 has compensated."""
        return arrival

    def accept(self, command: Accept) -> None:
        """Do nothing: the mean gradient comes from rank 0."""

    def gather(self) -> None:
        """Do nothing, as `resume_at`."""

    def accumulate(self) -> None:
        """Do nothing, as `assigned`."""

    def check(self, now: float) -> None:
        """Do nothing: rank 0 checks."""

    def close(self) -> None:
        """Do nothing, as `resume_at`."""


class Standby:
    """Standby of rank 0, which handles its events as rank 0 does, and computes only the updates.

    Coordinator and server then have the state of rank 0, because both are functions of the events and of the mean
    gradients. When rank 0 is lost and most of its workers have come here, the standby restarts the run from this state.

    Args:
        rank: settings of this process.
        server: server of the parameters.
        layout: layout of the model.
        stop: stop conditions of the run, as text.

    Attributes:
        now: seconds since the run began.
        is_settled: whether the server has the newest version.
        network: counts of the connections of this process.
    """

    is_settled = True

    def __init__(self, rank: Rank, server: ParameterServer, layout: FlatLayout, stop: str) -> None:
        self.network = NetworkCounters()
        self._rank = rank
        self._layout = layout
        self._stop = stop
        self._job_spec = rank.make_job_spec(server.model)
        self._succession = Succession()
        self._successor = RemoteWorkers(rank, server, layout, ShardClients([0]), self._succession)
        self._session: ClientSession | None = None
        self._received: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        self._workers = _FollowedWorkers(self._read)
        self._parameters = _FollowedParameters(server)
        self._following = RunLoop(self._workers, self._parameters, self._workers)
        self._leaves_on = ""
        self._processes: Collection[str] = ()  # of the workers at rank 0, at the newest message

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self._workers.now

    def __enter__(self) -> Self:
        """Join rank 0."""
        cluster = self._rank.cluster
        hello = messages.Hello.of(describe_process("the standby", cluster), cluster.worker, self._job_spec)
        self._session = join_rank_0(cluster, self._rank.transport, hello)
        given = cluster.standby_address
        host, port = host_and_port(given) if given else (self._session.connection.local_host, 0)
        port = self._successor.processes.listen(host, port)
        self._session.listen(self._received.put, self._received.put)
        self._session.connection.send(StandbyListens(port))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close all connections."""
        if self._session is not None:
            self._session.close()
        self._successor.processes.stop_listening()

    def resume_at(self, version: int, now: float) -> None:
        """Follow from this time."""
        self._workers.now = now

    def prepare_checkpoint(self) -> bool:
        """Return True: workers save what only they have for rank 0."""
        return True

    @holding_sigterm()  # else a signal between the handlers of follower and successor would be lost
    def run(self, coordinator: Coordinator, observe: Observer | None = None, first: Event | None = None) -> EndRun:
        """Follow rank 0 until its run ends, which ends this process; if rank 0 is lost, go on with the run.

        Raises:
            FollowedRunEnded: rank 0 has ended the run, or this process leaves it.
            RunError: rank 0 is lost, and too few workers have come here.
        """
        try:
            with self._rank.host.lifecycle.leaving_on_sigterm(self._leave):
                self._following.run(coordinator, observe, first)
                while True:  # the run is over, and rank 0 still has to say so
                    self._workers.next_event()
        except _RankZeroLost as lost:
            LOG.warning("%s; the standby goes on at update %d", lost, coordinator.version)
            return self._take_over(coordinator, observe)

    def _leave(self, reason: str) -> None:
        self._leaves_on = reason
        self._received.put(messages.Leave(reason))

    def _take_over(self, coordinator: Coordinator, observe: Observer | None) -> EndRun:
        def seen(now: float, event: Event | None, commands: Sequence[Command]) -> None:
            self._workers.now = now
            if observe is not None:
                observe(now, event, commands)

        if coordinator.awaits_step:
            # Rank 0 was lost before it sent the step of its update; this process has made the same step.
            assert self._parameters.step is not None
            applied = UpdateApplied(self.now, coordinator.version, self._parameters.step)
            seen(self.now, applied, coordinator.handle(applied))
        loop = self._successor.loop()
        loop.resume_at(coordinator.version, self.now)
        self._succession.known_processes = self._processes
        loop.signals.caught = self._leaves_on  # a SIGTERM that came before the takeover saves the run
        restarted = Restarted(self.now, self._rank.cluster.n, self._stop)
        with loop:
            return loop.run(coordinator, seen, restarted)

    def _read(self) -> Iterator[Event]:
        return self._events_of(self._received.get())

    def _events_of(self, message: Message | Exception) -> Iterator[Event]:
        """Handle a message, and return the events in it."""
        match message:
            case messages.FollowUpdate(events, version, missing, processes, tensors=tensors):
                self._processes = decoded(processes, at_most(list[str], self._rank.cluster.n), "processes")
                if version:
                    self._parameters.mean = FlatBuffers(self._layout, tensors["mean"])
                    self._parameters.mean.receive(IndexBits(missing))
                    assert self._session is not None
                    with suppress(ConnectionLost):  # its loss is in the queue
                        self._session.connection.send(UpdateReceived(version))
                return split_events(events)
            case messages.End():
                raise FollowedRunEnded(0)
            case messages.Leave(reason):  # of this process
                LOG.warning("the standby leaves the run: %s", reason)
                assert self._session is not None
                self._session.leave(reason)
                raise FollowedRunEnded(self._rank.cluster.leaving_status)
            case Exception() as error:
                raise _RankZeroLost(str(error))
        return iter(())
