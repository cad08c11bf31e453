"""Standby: a process that holds the state of rank 0, and goes on with the run if rank 0 is lost."""

from __future__ import annotations

import queue
from collections.abc import Collection, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

from paceline.clusters.rank_checks import host_and_port
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import (
    Accept,
    Apply,
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
from paceline.engines.base import Engine, Observer
from paceline.engines.distributed.parameter_server.succeeding_engine import SucceedingEngine
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.rendezvous import join_rank_0
from paceline.engines.distributed.rendezvous.session import ClientSession, describe_process
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.encoded import at_most, decoded
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.standby_messages import StandbyListens, UpdateReceived, split_events
from paceline.engines.signals import holding_sigterm
from paceline.errors import RunError
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class FollowedRunEnded(SystemExit):
    """Exit of the standby, because rank 0 has ended the run, or because this process leaves it."""


class _RankZeroLost(Exception):  # noqa: N818  # the reason to take over
    pass


class StandbyEngine(Engine):
    """Engine of the standby, which handles the events of rank 0 as rank 0 does, and computes only the updates.

    Coordinator and server then have the state of rank 0, because both are functions of the events and of the mean
    gradients. When rank 0 is lost and most of its workers have come here, the standby restarts the run from this state.

    Args:
        rank: settings of this process.
        server: server of the parameters.
        layout: layout of the model.
        stop: stop conditions of the run, as text.
    """

    def __init__(self, rank: Rank, server: ParameterServer, layout: FlatLayout, stop: str) -> None:
        super().__init__()
        self._rank = rank
        self._server = server
        self._layout = layout
        self._stop = stop
        self._job_spec = rank.make_job_spec(server.model)
        self._successor = SucceedingEngine(rank, server, layout)
        self._session: ClientSession | None = None
        self._received: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        self._events: Iterator[Event] = iter(())
        self._mean: FlatBuffers | None = None
        self._step: Step | None = None
        self._leaves_on = ""
        self._processes: Collection[str] = ()  # of the workers at rank 0, at the newest message

    def __enter__(self) -> Self:
        """Join rank 0."""
        cluster = self._rank.cluster
        hello = messages.Hello.of(describe_process("the standby", cluster), cluster.worker, self._job_spec)
        self._session = join_rank_0(cluster, self._rank.transport, hello)
        given = cluster.standby_address
        host, port = host_and_port(given) if given else (self._session.connection.local_host, 0)
        bound = self._successor.listen(host, port, self._job_spec)
        self._session.listen(self._received.put, self._received.put)
        self._session.connection.send(StandbyListens(bound))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close all connections."""
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._session is not None:
            self._session.close()
        self._successor.stop_listening()

    def resume_at(self, version: int, now: float) -> None:
        """Follow from this time."""
        self.now = now

    @holding_sigterm()  # else a signal between the handlers of follower and successor would be lost
    def run(self, coordinator: Coordinator, observe: Observer | None = None, first: Event | None = None) -> EndRun:
        """Follow rank 0 until its run ends, which ends this process; if rank 0 is lost, go on with the run.

        Raises:
            FollowedRunEnded: rank 0 has ended the run, or this process leaves it.
            RunError: rank 0 is lost, and too few workers have come here.
        """
        try:
            with self._rank.process.leaving_on_sigterm(self._leave):
                super().run(coordinator, observe, first)
                while True:  # the run is over, and rank 0 still has to say so
                    self.next_event()
        except _RankZeroLost as lost:
            LOG.warning("%s; the standby goes on at update %d", lost, coordinator.version)
            return self._take_over(coordinator, observe)

    def _leave(self, reason: str) -> None:
        self._leaves_on = reason
        self._received.put(messages.Leave(reason))

    def _take_over(self, coordinator: Coordinator, observe: Observer | None) -> EndRun:
        def seen(now: float, event: Event | None, commands: object) -> None:
            self.now = now
            if observe is not None:
                observe(now, event, commands)  # type: ignore[arg-type]

        if coordinator.awaits_step:
            assert self._step is not None
            applied = UpdateApplied(self.now, coordinator.version, self._step)
            seen(self.now, applied, coordinator.handle(applied))
        self._successor.resume_at(coordinator.version, self.now)
        self._successor.known_processes = self._processes
        self._successor.signals.caught = self._leaves_on
        restarted = Restarted(self.now, self._rank.cluster.n, self._stop)
        with self._successor as engine:
            return engine.run(coordinator, seen, restarted)

    # --- events of rank 0 -------------------------------------------------------------------------------------

    def next_event(self) -> Event:
        """Return the next event that rank 0 has handled."""
        while (event := next(self._events, None)) is None:
            self._read(self._received.get())
        self.now = event.now
        return event

    def _read(self, message: Message | Exception) -> None:
        match message:
            case messages.FollowUpdate(events, version, missing, processes, tensors=tensors):
                self._processes = decoded(processes, at_most(list[str], self._rank.cluster.n), "processes")
                self._events = split_events(events)
                if version:
                    self._mean = FlatBuffers(self._layout, tensors["mean"])
                    self._mean.receive(IndexBits(missing))
                    assert self._session is not None
                    with suppress(ConnectionLost):  # its loss is in the queue
                        self._session.connection.send(UpdateReceived(version))
            case messages.End():
                raise FollowedRunEnded(0)
            case messages.Leave(reason):  # of this process
                LOG.warning("the standby leaves the run: %s", reason)
                assert self._session is not None
                self._session.leave(reason)
                raise FollowedRunEnded(self._rank.cluster.leaving_status)
            case Exception():
                raise _RankZeroLost(str(message))

    # --- commands ---------------------------------------------------------------------------------------------

    def apply(self, command: Apply) -> None:
        """Make the update of rank 0."""
        if self._mean is None:
            raise RunError(
                f"the standby would make update {command.version}, which rank 0 has not made: it began with another "
                "state; give both the same folder to resume"
            )
        mean, self._mean = self._mean, None
        self._server.enqueue(mean, 1)
        self._step = self._server.apply(command)

    def compute(self, command: Compute) -> None:
        """Do nothing: rank 0 gives its workers their tasks."""

    def interrupt(self, command: Interrupt) -> None:
        """Do nothing, as `compute`."""

    def restart_worker(self, command: RestartWorker) -> None:
        """Do nothing, as `compute`."""

    def accept(self, command: Accept) -> None:
        """Do nothing: the mean gradient comes from rank 0."""

    def evaluate(self, command: Evaluate) -> None:
        """Do nothing: the result comes from rank 0."""

    def set_timer(self, command: SetTimer) -> None:
        """Do nothing: the timers ring at rank 0."""
