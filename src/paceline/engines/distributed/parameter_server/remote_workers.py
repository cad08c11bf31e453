"""Remote workers: processes on any host, at the process of the coordinator and the server."""

# Long: a class with a method for what each message of each kind of peer causes.

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch

from paceline.clusters.devices import cores
from paceline.clusters.launch_env import STANDBY
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import (
    END_OF_LOOP,
    AbortRun,
    Accept,
    Apply,
    Arrival,
    Compute,
    EndRun,
    Evaluate,
    Evaluated,
    Interrupt,
    Joined,
    Lost,
    Outcome,
    RestartWorker,
)
from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.announced_sums.announced_tensors import AnnouncedTensors
from paceline.engines.distributed.announced_sums.early_rounds import EarlyRounds
from paceline.engines.distributed.announced_sums.sum_groups import SumGroups
from paceline.engines.distributed.coordinator_tensors import CoordinatorTensors
from paceline.engines.distributed.failed_worker import why_failed
from paceline.engines.distributed.parameter_server.host_memory import host_memory_of
from paceline.engines.distributed.parameter_server.loop_options import LoopOptions
from paceline.engines.distributed.parameter_server.published_versions import PublishedVersions
from paceline.engines.distributed.parameter_server.remote_worker import ArrivingGradient, RemoteWorker, processes_of
from paceline.engines.distributed.parameter_server.restart_wait import RestartWait
from paceline.engines.distributed.parameter_server.served_tensors import ServedTensors
from paceline.engines.distributed.parameter_server.server_processes import ServerProcesses
from paceline.engines.distributed.parameter_server.shard_clients import ShardClients
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.acceptor import (
    GRACE_S,
    AcceptedPeer,
    AllWorkersLost,
    PeerEvent,
    PeerJoined,
    PeerLost,
    PeerMessage,
    PeerRejected,
    QueueHandler,
    SidecarDue,
)
from paceline.engines.distributed.rendezvous.first_workers import await_workers, not_joined
from paceline.engines.distributed.rendezvous.rendezvous import tell_launcher
from paceline.engines.distributed.rendezvous.session import failed_end, successful_end
from paceline.engines.distributed.standby.followed_parameters import first_state
from paceline.engines.distributed.standby.standby_follower import StandbyFollower
from paceline.engines.distributed.standby.standby_stream import StandbyStream
from paceline.engines.distributed.standby.succession import Succession
from paceline.engines.distributed.transport import messages, task_messages
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.standby_messages import StandbyForgotten, StandbyLost
from paceline.engines.distributed.transport.wires import make_wire
from paceline.engines.loop import RunLoop
from paceline.engines.ports import Workers
from paceline.engines.real_clock import RealClock
from paceline.engines.signals import Signals
from paceline.engines.task_board import TaskBoard
from paceline.errors import RunError, UsageError
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout, flat_copy
from paceline.utils.rank_logger import RankLogger
from paceline.worker.task_progress import TaskProgress

LOG = RankLogger(__name__)
POLL_S = 0.2
MIN_BYTES_PER_S = 50e6  # slowest link over which the final parameters are sent in time


# Long: it handles each message of each kind of peer, and what a message causes is a method.
class RemoteWorkers(Workers):
    """Workers in processes on any host, and the evaluator, at rank 0 of a protocol with a server.

    Args:
        rank: settings of this process.
        server: server of the parameters, or of their first shard.
        layout: layout of what the server holds.
        shards: clients of the servers of the other shards.
        succession: for a standby, how it takes the place of rank 0; None for rank 0.

    Attributes:
        clock: clock of the run.
        parameters: parameters of the run.
        processes: acceptor, and the processes of this host.
        signals: signals that this process gets.
        follower: stream to the standby of this process; None without one.
    """

    def __init__(
        self,
        rank: Rank,
        server: ParameterServer,
        layout: FlatLayout,
        shards: ShardClients,
        succession: Succession | None = None,
    ) -> None:
        self._rank = rank
        self._cluster = cluster = rank.cluster
        self._server = server
        self._shards = shards
        self._succession = succession
        self._needs_evaluator = rank.job.eval_data is not None
        self._wire = make_wire(cluster.wire, layout, loads_numba=True)  # it steps an optimizer (decision 0027)
        self._memory = host_memory_of(cluster, server.model)
        allocate = self._memory.allocate if self._memory is not None else None
        self._published = PublishedVersions(layout, self._wire, self._on_version_released, allocate)
        self.clock = RealClock()
        self._peer_events: EventQueue[PeerEvent] = EventQueue()
        shards.events = self._peer_events
        self._loop_options = LoopOptions(server)
        shards.step_options = lambda: self._loop_options.newest
        self._tensors = self._make_tensors(layout, QueueHandler(self._peer_events))
        self.parameters = self._tensors.parameters
        self.signals = rank.host.lifecycle.signals(cluster.notice)
        self._tasks = TaskBoard(self.parameters, self._send)
        self._threads = torch.get_num_threads()
        # The workers, the evaluator, the servers of the other shards, and the standby.
        self.processes = ServerProcesses(
            rank,
            rank.make_job_spec(server.model),
            processes=cluster.n + cluster.shards + cluster.standby,
            receiver=self._tensors.receiver,
            on_due=partial(self._peer_events.put, SidecarDue()),
        )
        self._peers: dict[int, RemoteWorker] = {}  # by peer id
        self._workers: dict[int, RemoteWorker] = {}  # those that were admitted, by number
        self._saved_draws: Mapping[int, int] = {}  # newest accepted draw of each worker in the newest checkpoint
        self._joined = 0  # number of workers so far
        self._has_updated = False  # whether an update was made by the commands that are carried out
        self._waiting: list[PeerEvent] = []  # processes that come or go
        self._evaluator: RemoteWorker | None = None
        self._unevaluated: Evaluate | None = None  # waits until there is an evaluator
        self._restart_wait = RestartWait(self._peer_events, cluster.start_timeout_s)
        self._end = messages.End("", "")
        self.follower: StandbyFollower | None = None
        if cluster.standby and succession is None:
            stream = StandbyStream(
                layout, self._peer_events, self._present, lambda: self._loop_options.newest, rank.folder
            )
            self.follower = StandbyFollower(stream, self.signals, cluster)

    def _make_tensors(self, layout: FlatLayout, handler: QueueHandler) -> CoordinatorTensors:
        if self._cluster.has_server:
            return ServedTensors(
                self._cluster,
                self._server,
                self._published,
                layout=layout,
                wire=self._wire,
                shards=self._shards,
                handler=handler,
                memory=self._memory,
            )
        rounds = EarlyRounds(is_certain=self._rank.plan.counts_all)
        return AnnouncedTensors(
            self._server,
            self._published,
            groups=SumGroups(handler, self._rank.transport, rounds, group_size=self._cluster.group_size),
            clock=self.clock,
            read=partial(self.clock.read, POLL_S),
            timeout_s=lambda: self._coordinator.timeout_s,
            options=self._loop_options,
            saves_shards=self._rank.folder is not None,
        )

    def loop(self) -> RunLoop:
        """Return the loop of the run."""
        return RunLoop(
            self,
            self.parameters,
            self.clock,
            follower=self.follower,
            signals=self.signals,
            network=self._rank.transport.counters,
        )

    def meet(self, coordinator: Coordinator) -> None:
        """Note the coordinator, which knows whose gradients are unneeded."""
        self._coordinator = coordinator

    def start(self, signals: Signals) -> bool:
        """Listen, start the processes of this host, and wait until those that the run needs have joined."""
        self._rank.host.lifecycle.set_num_threads(max(1, cores() // self._cluster.ranks.local_world_size))
        self.clock.watch(self._peer_events, self._read)
        if self._succession is None:
            self._begin()
        else:
            self._succeed(self._succession)
        # the coordinator begins with all workers
        self.clock.replace(not_joined(self._cluster, self._ready(), self.clock.now))
        return not signals.caught

    def _begin(self) -> None:
        self.processes.start()
        await_workers(self._cluster, self._ready, self._read_for_a_moment, self._missing)
        if not self.signals.caught:
            self._tensors.begin([worker for worker in self._workers.values() if worker.tasks.is_ready])
        if self.follower is not None:
            self.follower.stream.send_begin(first_state(self._server) if self._cluster.has_server else "")
            self._tensors.follow(self.follower.stream)

    def _succeed(self, succession: Succession) -> None:
        def lacks() -> str:
            # A run that ends at once needs a worker only for the parameters that this process lacks.
            is_enough = self.signals.caught and (self._cluster.has_server or self._present())
            return "" if is_enough else succession.lacks(self._present())

        self.processes.succeed()
        succession.await_workers(lacks, self._read_for_a_moment, self._cluster.start_timeout_s)
        ready = [worker for worker in self._workers.values() if worker.tasks.is_ready]
        succession.taken = self._tensors.take_over(ready, succession.newest_version)

    def _present(self) -> set[str]:
        """Return the processes of the workers that take part."""
        return processes_of(self._workers.values())

    def _ready(self) -> Collection[int]:
        """Return the workers that take part; all after a signal, which ends the run."""
        ready = [number for number, worker in self._workers.items() if worker.tasks.is_ready]
        return range(self._cluster.n) if self.signals.caught else ready

    def _missing(self) -> str:
        """Return the missing processes that are no workers."""
        if missing := self._shards.missing:
            return f"the server of shard {', '.join(map(str, missing))}"
        if self._needs_evaluator and self._evaluator is None and not self.signals.caught:
            return "the evaluator"
        is_missing = self.follower is not None and self.follower.stream.is_missing and not self.signals.caught
        return "the standby" if is_missing else ""

    def _read_for_a_moment(self) -> None:
        self.clock.read(POLL_S)
        self.processes.check()

    def close(self, error: BaseException | None) -> None:
        """Tell all processes the end of the run, and release what it has started."""
        torch.set_num_threads(self._threads)
        end = failed_end(error) if error else self._end
        self._restart_wait.close()
        self.processes.close(partial(self._send_end, end), self._peer_events.close)
        self._peers.clear()
        self._workers.clear()
        self._evaluator = None
        self._tensors.close()

    def _send_end(self, end: messages.End) -> None:
        """Send the end of the run and the final parameters to all processes, and wait until they have gone."""
        if self.follower is not None and self.follower.has_handed_over:
            return
        following = self.follower.stream.send_end(end) if self.follower is not None else []
        self.processes.announce(end)
        # They have joined since the loop took its last event.
        late = [event.peer for event in self._peer_events.drain() if isinstance(event, PeerJoined)]
        for peer in late:
            peer.connection.send(end)
        late_ids = [peer_id for peer in late for peer_id in (peer.peer_id, *peer.others)]
        final = flat_copy(self._server.model, self._cluster.shards).memory
        is_whole = self._cluster.group_size == 1  # else each rank has its shard of the final parameters
        for worker in self._peers.values():
            worker.connection.send(end.with_parameters(final) if is_whole else end)
        self._shards.send(end)
        of_workers = [peer_id for worker in self._peers.values() for peer_id in worker.peer_ids]
        peer_ids = [*of_workers, *self._shards.peer_ids, *late_ids]
        self.processes.join(peer_ids, GRACE_S + len(peer_ids) * final.nbytes / MIN_BYTES_PER_S)
        if following:
            self.processes.join(following, GRACE_S)

    def ended(self, command: EndRun) -> None:
        """Note the end, of which `close` tells the workers."""
        self._tensors.ended()
        self._end = successful_end(command, self.clock.now, self._coordinator)

    # --- commands -----------------------------------------------------------------------------------------

    def compute(self, command: Compute) -> None:
        """Give a worker a task."""
        self._tasks.assign(command)

    def interrupt(self, command: Interrupt) -> None:
        """Ask a worker to cancel its task."""
        if self._tasks.cancels(command):
            worker = self._workers[command.worker]
            worker.last = ("interrupted", 0)
            worker.unneeded = command.draw
            worker.connection.send(task_messages.CancelTask(command.draw))

    def restart(self, command: RestartWorker) -> None:
        """Keep the worker: only its launcher can restart it."""

    def accepted(self, command: Accept) -> None:
        """Note what became of the gradient, for the worker's next task."""
        self._workers[command.worker].last = ("used", command.staleness)

    def updating(self, command: Apply) -> None:
        """Note that the update may make gradients unneeded, or that it is skipped with those of all workers."""
        self._has_updated = True
        if command.is_skipped:
            for worker in self._workers.values():
                worker.on_skipped_update()

    def on_commands(self) -> None:
        """Tell workers whose gradients an update has made unneeded and no command has cancelled."""
        if self._has_updated:
            self._has_updated = False
            for worker in self._workers.values():
                worker.tell_if_unneeded(self._coordinator.would_accept)
        self._handle_waiting()

    def on_idle(self) -> None:
        """Do nothing: the cores of this host are divided among its processes."""

    def save_after(self, draws: Mapping[int, int]) -> None:
        """Let each worker save its state after this draw, with its next task."""
        self._saved_draws = draws

    def evaluate(self, command: Evaluate) -> None:
        """Send the version to the evaluator, once there is one."""
        self.parameters.gather()
        version = self._published.acquire(command.version)
        if self._evaluator is None:
            self._unevaluated = command
            return
        self._shards.send(task_messages.AssignEvaluation(self._evaluator.peer_id, command.version))
        self._evaluator.evaluating.add(command.version)
        self._evaluator.connection.send(task_messages.RemoteEvaluateTask(command.version), [(0, version.memory)])

    def _on_version_released(self, version: int) -> None:
        self._shards.send(task_messages.ReleaseVersion(version))

    def _send(self, command: Compute) -> None:
        worker = self._workers[command.worker]
        version = self._tensors.version_for(worker, command.version)
        last, staleness = worker.last
        task = task_messages.RemoteTask.of(
            command,
            sends_version=version.is_new,
            run_s=self.clock.elapsed_s(),
            progress=TaskProgress.of(command, last, staleness, self._saved_draws.get(command.worker, 0)),
            is_difference=version.is_difference,
            checksum=version.checksum,
            early=version.early,
            slot=version.slot,
        )
        worker.on_sent(command.version)
        self._shards.send(
            task_messages.AssignTask(
                peer_id=worker.peer_id,
                draw=command.draw,
                version=command.version,
                sends_version=version.is_new,
                slot=version.slot,
            )
        )
        worker.connection.send(task, version.buckets)

    # --- events -------------------------------------------------------------------------------------------

    def _read(self) -> None:
        event = self._peer_events.get()
        if isinstance(event, PeerLost):
            self._waiting = [each for each in self._waiting if not _is_of(each, event.peer_id)]
        if (
            isinstance(event, PeerMessage)
            and isinstance(event.message, messages.Leave)
            and event.peer_id in self._peers
        ):
            if (worker := self._peers.get(event.peer_id)) is not None:
                worker.is_leaving = True
            self._waiting.append(event)
        elif isinstance(event, PeerJoined):
            self._waiting.append(event)
        else:
            self._handle(event)
        self._tensors.settle()
        self._handle_waiting()

    def _handle_waiting(self) -> None:
        """Handle processes that come or go, unless the tensors are busy, or gradients wait of one that goes."""
        while self._waiting and not self._tensors.is_busy:
            if isinstance(self._waiting[0], PeerMessage) and self.clock.has_events:
                break  # the gradient of the worker may be among these
            self._handle(self._waiting.pop(0))

    def _handle(self, event: PeerEvent) -> None:
        stream = self.follower.stream if self.follower is not None else None
        match event:
            case PeerMessage() | PeerLost() if stream is not None and stream.is_from(event):
                self._on_standby(stream, event)
            case PeerMessage(peer_id, StandbyForgotten()) if stream is not None:
                if peer_id in self._peers:
                    stream.forget(self._peers[peer_id].process)
            case PeerJoined(peer):
                self._on_join(peer)
            case PeerRejected(reason):
                if not self.clock.has_begun:
                    raise UsageError(reason)
                LOG.warning("rejected a process: %s", reason)
            case PeerMessage(peer_id) | PeerLost(peer_id) if number := self._shards.number_of(peer_id):
                self._on_shard_event(number, event)
            case PeerMessage(peer_id) if peer_id in self._peers:
                self._on_message(self._peers[peer_id], event)
            case PeerLost(peer_id, reason) if peer_id in self._peers:
                self._on_gone(self._peers.pop(peer_id), reason)
            case AllWorkersLost(joined) if joined == self._joined:  # no worker has joined since the wait began
                reason = f"all workers are gone and none has joined for {self._cluster.start_timeout_s:g} s"
                self.clock.add(AbortRun(self.clock.elapsed_s(), Outcome.NO_WORKERS, reason))
            case SidecarDue():
                self.processes.start_again()
            case Exception() as error:
                raise error

    def _on_standby(self, stream: StandbyStream, event: PeerMessage | PeerLost) -> None:
        stream.on_event(event)
        stream.send_address(self._peers.values())
        if stream.is_lost:
            for worker in self._peers.values():
                worker.connection.send(StandbyLost())

    def _on_join(self, peer: AcceptedPeer) -> None:
        if self.follower is not None and peer.worker == self._cluster.standby_number:
            self.follower.stream.on_join(peer)
            tell_launcher(self._cluster, STANDBY)
            return
        if peer.worker > self._cluster.n:
            self._shards.on_join(peer.worker - self._cluster.n, peer)
            return
        self._shards.send_addresses([peer])
        for previous in [each for each in self._peers.values() if each.worker == peer.worker]:
            self._disconnect(previous, "replaced by another process")  # its host may be gone
        worker = self._peers[peer.peer_id] = RemoteWorker(peer, self._shards.numbers, self._tasks[peer.worker])
        self._admit(worker)
        if self.follower is not None:
            self.follower.stream.send_address([peer])

    def _admit(self, worker: RemoteWorker) -> None:
        """Let a worker take part if all shard servers have admitted it."""
        if worker.not_admitted_by:
            return
        worker.tasks.is_ready = True
        if worker.worker == self._cluster.n:
            self._evaluator = worker
            waiting, self._unevaluated = self._unevaluated, None
            if waiting is not None:
                self.evaluate(waiting)
                self._published.release(waiting.version)  # which `evaluate` has acquired once more
        else:
            self._workers[worker.worker] = worker
            self._joined += 1
            self.processes.on_joined(worker.worker)
            if self.clock.has_begun:
                self._tensors.admit(worker)
            self.clock.add(Joined(self.clock.elapsed_s(), worker.worker))

    def _on_shard_event(self, number: int, event: PeerMessage | PeerLost) -> None:
        if isinstance(event, PeerLost):
            self._shards.on_leave(number, event.reason)
            return
        match event.message:
            case task_messages.GradientReceived(peer_id, draw) if peer_id in self._peers:
                worker = self._peers[peer_id]
                self._deliver(worker, worker.on_part_received(number, draw))
            case messages.ShardListens(port):
                self._shards.on_listening(number, port)
                self._shards.send_addresses(self._peers.values())
            case messages.PeerAdmitted(peer_id) if peer_id in self._peers:
                worker = self._peers[peer_id]
                worker.not_admitted_by.discard(number)
                self._admit(worker)
            case messages.PeerDisconnected(peer_id, reason) if peer_id in self._peers:
                self._disconnect(self._peers[peer_id], f"the server of shard {number} has lost it: {reason}")
            case message:
                self._shards.on_message(number, message)

    def _on_message(self, worker: RemoteWorker, event: PeerMessage) -> None:
        if reason := worker.why_refused(event.message):
            self._disconnect(worker, reason)
            return
        match event.message:
            case task_messages.RemoteTaskDone() as done if reason := self._loop_options.take(done):
                self._disconnect(worker, reason)
            case task_messages.RemoteTaskDone() as done:
                self._deliver(worker, worker.on_task_done(done, event))
            case task_messages.RemoteTaskCancelled():
                self._tasks.on_idle(worker.worker)
            case task_messages.EvaluationResult(version) as result:
                try:
                    metrics = worker.metrics_of(result)
                except ValueError as error:
                    self._disconnect(worker, str(error))
                    return
                self._published.release(version)
                self.clock.add(Evaluated(self.clock.elapsed_s(), version, metrics))
            case messages.Leave(reason):
                self._tensors.leaving()
                self._disconnect(worker, reason)
            case messages.Pause(reason):
                worker.is_paused = True
                self.clock.add(Lost(self.clock.elapsed_s(), worker.worker, reason))
            case messages.Resume():
                worker.is_paused = False
                self.clock.add(Joined(self.clock.elapsed_s(), worker.worker))
            case messages.Failed() as failed:
                reason = why_failed(failed, worker.worker, self._rank.folder)
                if not self.clock.has_begun:
                    raise RunError(f"worker {worker.worker} failed while it started: {reason}")
                self._disconnect(worker, reason)
            case message:
                try:
                    meaning = self._tensors.on_message(worker, message, self.clock.elapsed_s())
                except ValueError as error:
                    self._disconnect(worker, str(error))
                    return
                if meaning is not None:
                    self.clock.add(meaning)

    def _deliver(self, worker: RemoteWorker, arriving: ArrivingGradient | None) -> None:
        """Report a gradient if all its parts have arrived."""
        if arriving is None:
            return
        done = arriving.done
        seconds: dict[str, Any] = worker.on_delivered(arriving)
        self._tensors.on_gradient(worker.worker, arriving, sum(seconds.values()))
        now = self.clock.elapsed_s()
        self.clock.add(Arrival(now, worker.worker, done.draw, done.measured, **seconds))
        self._tasks.on_gradient(worker.worker, IndexBits(done.missing))

    def _on_gone(self, worker: RemoteWorker, reason: str) -> None:
        self._shards.send(messages.DisconnectPeer(worker.peer_id))
        self._published.forget(worker.peer_id)
        if worker is self._evaluator:
            raise RunError(f"the process that evaluates ended: {reason}")
        worker.tasks.is_ready = False
        self._tasks.on_lost(worker.worker)
        self.clock.add(Lost(self.clock.elapsed_s(), worker.worker, reason))
        self._tensors.lose(worker)
        if self.clock.has_begun and not worker.is_leaving:
            self.processes.on_lost(worker.worker)
        if self.follower is not None:
            self.follower.stream.check_workers()
        if not self.clock.has_begun or any(each.tasks.is_ready for each in self._workers.values()):
            return
        if reason == END_OF_LOOP:  # no launcher starts this worker again
            every = "every worker has left by the end of its loop"
            self.clock.add(AbortRun(self.clock.elapsed_s(), Outcome.STOPPED, every))
        else:
            self._restart_wait.begin(self._joined)

    def _disconnect(self, worker: RemoteWorker, reason: str) -> None:
        del self._peers[worker.peer_id]
        self.processes.disconnect(worker.peer_id)
        self._on_gone(worker, reason)


def _is_of(event: PeerEvent, peer_id: int) -> bool:
    """Return whether a process has joined that has this id."""
    return isinstance(event, PeerJoined) and event.peer.peer_id == peer_id
