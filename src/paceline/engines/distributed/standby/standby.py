"""Standby: a process that holds the state of rank 0, and goes on with the run if rank 0 is lost."""

from __future__ import annotations

import queue
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from paceline.clusters.rank_checks import host_and_port
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Command, EndRun, Event, Restarted, UpdateApplied
from paceline.engines.distributed.coordinator_tensors import Taken
from paceline.engines.distributed.parameter_server.remote_workers import RemoteWorkers
from paceline.engines.distributed.parameter_server.shard_clients import ShardClients
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.rendezvous import join_rank_0
from paceline.engines.distributed.rendezvous.session import ClientSession, describe_process
from paceline.engines.distributed.standby.followed_parameters import FollowedParameters, FollowedServer, FollowedSums
from paceline.engines.distributed.standby.followed_workers import FollowedWorkers, NoMoreEvents
from paceline.engines.distributed.standby.succession import Succession
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.encoded import at_most, decoded
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.standby_messages import StandbyListens, UpdateReceived
from paceline.engines.loop import Observer, RunLoop
from paceline.engines.signals import holding_sigterm
from paceline.errors import RunError
from paceline.recording.metrics.network_counters import NetworkCounters
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class FollowedRunEnded(SystemExit):
    """Exit of the standby, because rank 0 has ended the run, or because this process leaves it."""


class _RankZeroLost(Exception):  # noqa: N818  # the reason to take over
    pass


class Standby:
    """Standby of rank 0, which handles its events as rank 0 does, and computes only the updates.

    Coordinator and server then have the state of rank 0, because both are functions of the events and of the mean
    gradients. Without a server the ranks have the parameters, and only the coordinator is followed. When rank 0 is lost
    and most of its workers have come here, the standby restarts the run from this state.

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
        self._stop = stop
        self._job_spec = rank.make_job_spec(server.model)
        self._succession = Succession()
        self._successor = RemoteWorkers(rank, server, layout, ShardClients([0]), self._succession)
        self._session: ClientSession | None = None
        self._received: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        self._workers = FollowedWorkers(self._read)
        self._parameters: FollowedParameters
        if rank.cluster.has_server:
            self._parameters = FollowedServer(server, layout)
        else:
            self._parameters = FollowedSums(server)
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
            LOG.warning("%s; the standby takes its place", lost)
            return self._take_over(coordinator, observe)

    def _leave(self, reason: str) -> None:
        self._leaves_on = reason
        self._received.put(messages.Leave(reason))

    def _take_over(self, coordinator: Coordinator, observe: Observer | None) -> EndRun:
        def seen(now: float, event: Event | None, commands: Sequence[Command]) -> None:
            self._workers.now = now
            if observe is not None:
                observe(now, event, commands)

        loop, held = self._successor.loop(), self._parameters.held
        loop.resume_at(coordinator.version, held[-1].events[-1].now if held else self.now)
        self._succession.known_processes = self._processes
        self._succession.newest_version = held[-1].version if held else coordinator.version
        loop.signals.caught = self._leaves_on  # a SIGTERM that came before the takeover saves the run
        with loop:
            self._catch_up(coordinator, observe, self._succession.taken)
            return loop.run(coordinator, seen, Restarted(loop.now, self._rank.cluster.n, self._stop))

    def _catch_up(self, coordinator: Coordinator, observe: Observer | None, taken: Taken) -> None:
        """Handle the events of rank 0 up to the version with which the run goes on."""
        made = [event for update in self._parameters.held if update.version <= taken.version for event in update.events]
        if made:
            self._workers.replay(made[1:])
            with suppress(NoMoreEvents):
                self._following.run(coordinator, observe, made[0])
        if coordinator.version != taken.version:
            raise RunError(
                f"a worker has version {taken.version}, but the events of rank 0 that came here end at version "
                f"{coordinator.version}; paceline run continues from the last checkpoint in out="
            )
        if coordinator.awaits_step:
            # Rank 0 was lost before it sent the step of its update, which this process or a worker has.
            step = taken.step or self._parameters.step
            assert step is not None
            applied = UpdateApplied(self.now, coordinator.version, step)
            commands = coordinator.handle(applied)
            if observe is not None:
                observe(self.now, applied, commands)

    def _read(self) -> Iterator[Event]:
        return self._events_of(self._received.get())

    def _events_of(self, message: Message | Exception) -> Iterator[Event]:
        """Handle a message, and return the events in it."""
        match message:
            case messages.FollowUpdate(version=version, processes=processes):
                self._processes = decoded(processes, at_most(list[str], self._rank.cluster.n), "processes")
                events = self._parameters.receive(message)
                if version:
                    assert self._session is not None
                    with suppress(ConnectionLost):  # its loss is in the queue
                        self._session.connection.send(UpdateReceived(version))
                return events
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
