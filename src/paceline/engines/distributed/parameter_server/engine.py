"""Parameter server engine: coordinator and server in this process, workers in processes on any host."""

from __future__ import annotations

import logging
import selectors
from collections import deque
from collections.abc import Collection

from paceline.clusters.devices import cores
from paceline.clusters.torchrun import Torchrun
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
    Event,
    Interrupt,
    Joined,
    Lost,
    Outcome,
    RestartWorker,
)
from paceline.core.index_bits import IndexBits
from paceline.engines.base import Observer
from paceline.engines.distributed.failed_worker import why_failed
from paceline.engines.distributed.parameter_server.link_utilization import LinkMonitor
from paceline.engines.distributed.parameter_server.loop_options import LoopOptions
from paceline.engines.distributed.parameter_server.published_versions import PublishedVersions
from paceline.engines.distributed.parameter_server.remote_worker import ArrivingGradient, RemoteWorker
from paceline.engines.distributed.parameter_server.restart_wait import RestartWait
from paceline.engines.distributed.parameter_server.shard_clients import ShardClients
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.acceptor import (
    GRACE_S,
    AcceptedPeer,
    Acceptor,
    AllWorkersLost,
    PeerEvent,
    PeerJoined,
    PeerLost,
    PeerMessage,
    PeerRejected,
    QueueHandler,
)
from paceline.engines.distributed.rendezvous.first_workers import await_workers, not_joined
from paceline.engines.distributed.rendezvous.rendezvous import listen_as_rank_0
from paceline.engines.distributed.rendezvous.session import failed_end, successful_end
from paceline.engines.distributed.rendezvous.sidecar import Sidecar
from paceline.engines.distributed.transport import messages, task_messages
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.wire import WireBuffer
from paceline.engines.distributed.transport.wires import make_wire
from paceline.engines.server_side import will_be_compensated
from paceline.engines.worker_pool import WorkerPoolEngine
from paceline.errors import RunError, UsageError
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout, flat_copy
from paceline.utils.rank_logger import RankLogger
from paceline.worker.parameter_guard import checksum

LOG = RankLogger(__name__)
POLL_S = 0.2
MIN_BYTES_PER_S = 50e6  # slowest link over which the final parameters are sent in time


# Long: it handles each message of each kind of peer, and what a message causes is a method.
class ParameterServerEngine(WorkerPoolEngine[RemoteWorker]):
    """Engine of rank 0 under a protocol with a server.

    Args:
        rank: settings of this process.
        server: server of the parameters, or of their first shard.
        layout: layout of what the server holds.
        shards: clients of the servers of the other shards.
    """

    def __init__(self, rank: Rank, server: ParameterServer, layout: FlatLayout, shards: ShardClients) -> None:
        self._cluster = cluster = rank.cluster
        self._rank = rank
        self._needs_evaluator = rank.job.eval_data is not None
        self._wire = make_wire(cluster.wire, layout, loads_numba=True)
        self._published = PublishedVersions(layout, self._wire, self._on_version_released)
        self._link_monitor = LinkMonitor(cluster.n, _shard_nbytes(cluster, server), cluster.bytes_per_s)
        super().__init__(server, self._published, [layout.allocate() for _ in range(cluster.n)], debug=cluster.debug)
        self.signals = rank.process.signals(cluster.notice)
        self.network = rank.transport.counters
        self._shards = shards
        self._job_spec = rank.make_job_spec(server.model)
        self._peer_events: EventQueue[PeerEvent] = EventQueue()
        shards.events = self._peer_events
        self._handler = QueueHandler(self._peer_events)
        self._acceptor: Acceptor | None = None
        self._peers: dict[int, RemoteWorker] = {}  # by peer id
        self._joined = 0  # number of workers so far
        self._loop_options = LoopOptions(server)
        self._newest_told = 0  # version at which the workers were told which gradients are unneeded
        self._evaluator: RemoteWorker | None = None
        self._sidecars: list[Sidecar] = []
        self._restart_wait = RestartWait(self._peer_events, cluster.start_timeout_s)
        self._end = messages.End("", "")

    def _start_workers(self) -> None:
        self._rank.process.set_num_threads(max(1, cores() // self._cluster.ranks.local_world_size))
        self._acceptor = listen_as_rank_0(
            self._cluster, self._rank.transport, self._job_spec, self._buffers(), self._handler
        )
        beside = [0] * self._cluster.has_worker_at_server + [self._cluster.n] * self._needs_evaluator
        self._sidecars += [self._rank.process.start_sidecar(number) for number in beside]
        self._selector.register(self._peer_events, selectors.EVENT_READ)
        await_workers(self._cluster, self._ready, self._read_for_a_moment, self._missing)
        self._shards.init(self._first_version)
        self._events = deque(not_joined(self._cluster, self._ready(), self.now))

    def _buffers(self) -> list[WireBuffer | None]:
        """Return memory for a gradient of each worker, and None for the evaluator, shard servers and the standby."""
        buffers: list[WireBuffer | None] = [WireBuffer(self._wire, gradient) for gradient in self._gradients]
        return [*buffers, *[None] * (self._cluster.shards + self._cluster.standby)]

    def _ready(self) -> Collection[int]:
        """Return the workers that take part; all after a signal, which ends the run."""
        ready = [number for number, worker in self._workers.items() if worker.is_ready]
        return range(self._cluster.n) if self.signals.caught else ready

    def _missing(self) -> str:
        """Return the missing processes that are no workers."""
        if missing := self._shards.missing:
            return f"the server of shard {', '.join(map(str, missing))}"
        is_complete = not self._needs_evaluator or self._evaluator is not None or self.signals.caught
        return "" if is_complete else "the evaluator"

    def _read_for_a_moment(self) -> None:
        for key, _ in self._selector.select(timeout=POLL_S):
            self._read(key)
        for sidecar in self._sidecars:
            sidecar.check()

    def _close(self, error: BaseException | None) -> None:
        for sidecar in self._sidecars[self._cluster.has_worker_at_server :]:
            sidecar.kill()  # the evaluator, whose result is no longer needed
        if self._acceptor is not None:
            self._send_end(self._acceptor, failed_end(error) if error else self._end)
        self._restart_wait.close()
        if self._acceptor is None or self._acceptor.close():
            self._rank.close()
            self._peer_events.close()
        for sidecar in self._sidecars:
            sidecar.stop()
        self._peers.clear()
        self._workers.clear()
        self._evaluator = self._acceptor = None
        self._selector.close()

    def _send_end(self, acceptor: Acceptor, end: messages.End) -> None:
        """Send the end of the run and the final parameters to all processes, and wait until they have gone."""
        acceptor.announce_end(end)
        late = [event.peer for event in self._peer_events.drain() if isinstance(event, PeerJoined)]
        for peer in late:
            peer.connection.send(end)
        final = flat_copy(self._server.model, self._cluster.shards).memory
        for worker in self._peers.values():
            worker.connection.send(end.with_parameters(final))
        self._shards.send(end)
        peer_ids = [*self._peers, *self._shards.peer_ids, *(peer.peer_id for peer in late)]
        acceptor.join(peer_ids, GRACE_S + len(peer_ids) * final.nbytes / MIN_BYTES_PER_S)

    def run(self, coordinator: Coordinator, observe: Observer | None = None, first: Event | None = None) -> EndRun:
        """Run to the end and return the last command, which is sent to the workers too."""
        last = super().run(coordinator, observe, first)
        self._log_link(self._link_monitor.final_report())
        self._server.gather_shards()
        self._end = successful_end(last, self.now, coordinator)
        return last

    # --- commands -----------------------------------------------------------------------------------------

    def apply(self, command: Apply) -> None:
        """Make the update on all shards, in other storage if the previous version is still read, and publish it."""
        self._shards.apply(command, is_read=self._published.is_newest_read)
        super().apply(command)

    def accept(self, command: Accept) -> None:
        """Add all parts of a gradient to the pending update."""
        self._shards.send(task_messages.AcceptGradient(command.worker, command.samples, command.step_scale))
        self._workers[command.worker].last = ("used", command.staleness)
        super().accept(command)

    def _compensated(self, arrival: Arrival) -> Arrival:
        version = self._read_by.get((arrival.worker, arrival.draw))
        if version is not None and will_be_compensated(arrival, self._coordinator):
            self._shards.compensate(arrival, self._coordinator, version)
        return super()._compensated(arrival)

    def _on_version_released(self, version: int) -> None:
        self._shards.send(task_messages.ReleaseVersion(version))

    def _send(self, worker: RemoteWorker, command: Compute) -> None:
        sends_version, debug = worker.newest_sent != command.version, self._cluster.debug
        last, staleness = worker.last
        buckets, is_difference = self._published.message(worker.peer_id, command.version, sends_version)
        task = task_messages.RemoteTask.of(
            command,
            sends_version=sends_version,
            run_s=self._elapsed_s(),
            progress=self._progress(command, last, staleness),
            is_difference=is_difference,
            checksum=checksum(self._published.held_by(worker.peer_id, command.version)) if debug else None,
        )
        worker.on_sent(command.version)
        self._shards.send(
            task_messages.AssignTask(
                peer_id=worker.peer_id, draw=command.draw, version=command.version, sends_version=sends_version
            )
        )
        worker.connection.send(task, buckets)

    def _cancel_task(self, worker: RemoteWorker, command: Interrupt) -> None:
        worker.last = ("interrupted", 0)
        worker.unneeded = command.draw
        worker.connection.send(task_messages.CancelTask(command.draw))

    def restart_worker(self, command: RestartWorker) -> None:
        """Keep the worker: only its launcher can restart it."""

    def evaluate(self, command: Evaluate) -> None:
        """Send the version to the evaluator."""
        assert self._evaluator is not None
        version = self._versions.acquire(command.version)
        self._shards.send(task_messages.AssignEvaluation(self._evaluator.peer_id, command.version))
        self._evaluator.evaluating.add(command.version)
        self._evaluator.connection.send(task_messages.RemoteEvaluateTask(command.version), [(0, version.memory)])

    # --- events -------------------------------------------------------------------------------------------

    def next_event(self) -> Event:
        """Tell workers whose gradients are unneeded, and wait for a worker, a timer or a signal."""
        if self._coordinator.version > self._newest_told:
            self._newest_told = self._coordinator.version
            for worker in self._workers.values():
                worker.tell_if_unneeded(self._coordinator.would_accept)
        return super().next_event()

    def _read(self, key: selectors.SelectorKey) -> None:
        self._handle(self._peer_events.get())

    def _handle(self, event: PeerEvent) -> None:
        match event:
            case PeerJoined(peer):
                self._on_join(peer)
            case PeerRejected(reason):
                if not self._begun_s:
                    raise UsageError(reason)
                LOG.warning("rejected a process: %s", reason)
            case PeerMessage(peer_id) | PeerLost(peer_id) if number := self._shards.number_of(peer_id):
                self._on_shard_event(number, event)
            case PeerMessage(peer_id) if peer_id in self._peers:
                self._on_message(self._peers[peer_id], event)
            case PeerLost(peer_id, reason) if peer_id in self._peers:
                self._on_gone(self._peers.pop(peer_id), reason)
            case AllWorkersLost(joined) if joined == self._joined:
                reason = f"all workers are gone and none has joined for {self._cluster.start_timeout_s:g} s"
                self._events.append(AbortRun(self._elapsed_s(), Outcome.NO_WORKERS, reason))
            case Exception() as error:
                raise error

    def _on_join(self, peer: AcceptedPeer) -> None:
        if peer.worker > self._cluster.n:
            self._shards.on_join(peer.worker - self._cluster.n, peer)
            return
        self._shards.send_addresses([peer])
        for previous in [each for each in self._peers.values() if each.worker == peer.worker]:
            self._disconnect(previous, "replaced by another process")  # its host may be gone
        worker = self._peers[peer.peer_id] = RemoteWorker(peer, self._shards.numbers)
        self._admit(worker)

    def _admit(self, worker: RemoteWorker) -> None:
        """Let a worker take part if all shard servers have admitted it."""
        if worker.not_admitted_by:
            return
        worker.is_ready = True
        if worker.worker == self._cluster.n:
            self._evaluator = worker
        else:
            self._workers[worker.worker] = worker
            self._joined += 1
            self._events.append(Joined(self._elapsed_s(), worker.worker))

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
                self._on_idle(worker)
            case task_messages.EvaluationResult(version) as result:
                try:
                    metrics = worker.metrics_of(result)
                except ValueError as error:
                    self._disconnect(worker, str(error))
                    return
                self._versions.release(version)
                self._events.append(Evaluated(self._elapsed_s(), version, metrics))
            case messages.Leave(reason):
                self._disconnect(worker, reason)
            case messages.Pause(reason):
                self._events.append(Lost(self._elapsed_s(), worker.worker, reason))
            case messages.Resume():
                self._events.append(Joined(self._elapsed_s(), worker.worker))
            case messages.Failed() as failed:
                reason = why_failed(failed, worker.worker, self._rank.folder)
                if not self._begun_s:
                    raise RunError(f"worker {worker.worker} failed while it started: {reason}")
                self._disconnect(worker, reason)

    def _deliver(self, worker: RemoteWorker, arriving: ArrivingGradient | None) -> None:
        """Report a gradient if all its parts have arrived."""
        if arriving is None:
            return
        done = arriving.done
        seconds = worker.on_delivered(arriving)
        if not done.is_notice:
            report = self._link_monitor.on_gradient(worker.worker, done.stats.compute_s, sum(seconds.values()))
            self._log_link(report)
        self._on_gradient(worker.worker, done.draw, done.stats, IndexBits(done.missing), **seconds)

    def _log_link(self, report: str | None) -> None:
        if report is not None:
            LOG.log(logging.WARNING if self._link_monitor.is_bottleneck else logging.INFO, "%s", report)

    def _on_gone(self, worker: RemoteWorker, reason: str) -> None:
        self._shards.send(messages.DisconnectPeer(worker.peer_id))
        self._published.forget(worker.peer_id)
        if worker is self._evaluator:
            raise RunError(f"the process that evaluates ended: {reason}")
        self._on_lost(worker.worker, worker, reason)
        self._log_link(self._link_monitor.on_lost(worker.worker))
        if not self._begun_s or any(each.is_ready for each in self._workers.values()):
            return
        if reason == END_OF_LOOP:  # no launcher starts this worker again
            every = "every worker has left by the end of its loop"
            self._events.append(AbortRun(self._elapsed_s(), Outcome.STOPPED, every))
        else:
            self._restart_wait.begin(self._joined)

    def _disconnect(self, worker: RemoteWorker, reason: str) -> None:
        """Disconnect a process, which waits for that if it leaves on purpose."""
        assert self._acceptor is not None
        del self._peers[worker.peer_id]
        self._acceptor.disconnect(worker.peer_id, GRACE_S)
        self._on_gone(worker, reason)


def _shard_nbytes(cluster: Torchrun, server: ParameterServer) -> list[int]:
    """Return the bytes of each shard on the wire."""
    layouts = [FlatLayout(server.model, cluster.shards, only=number) for number in range(cluster.shards)]
    return [make_wire(cluster.wire, layout).nbytes for layout in layouts]
