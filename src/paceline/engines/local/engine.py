"""Runs worker processes on this machine and reports what they do."""

from __future__ import annotations

import selectors
import sys
import time
from contextlib import closing, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

import torch

from paceline.clusters.devices import cores
from paceline.clusters.local import LocalCluster
from paceline.core.events import AbortRun, Compute, Evaluate, Evaluated, Interrupt, Joined, Outcome, RestartWorker
from paceline.engines.local import worker_process as processes
from paceline.engines.local.messages import (
    ComputeTask,
    EvaluateTask,
    EvaluationDone,
    TaskCancelled,
    TaskDone,
    TaskFailed,
    WakeUp,
    WorkerReady,
)
from paceline.engines.wall_clock import Peer, WallClockEngine
from paceline.errors import RunError, UsageError
from paceline.jobs.job import Job
from paceline.processes.child_process import Launcher, ProcessSettings, describe_exit
from paceline.processes.shared_memory import SharedMemory, SharedVectors
from paceline.processes.shared_pickle import SharedPickle
from paceline.processes.unpicklable import pickled
from paceline.server.flat_buffers import FlatLayout
from paceline.server.parameter_server import ParameterServer
from paceline.server.version_store import VersionStore
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)

RESPAWNS_WITHOUT_A_GRADIENT = 3
GRACE_S = 2.0


class _Peer(Peer):
    """A process of the run."""

    def __init__(self, process: ForkServerProcess, connection: Connection) -> None:
        super().__init__()
        self.process = process
        self.connection = connection
        self.is_replaced = False  # was told to end, for another one to take its place

    def send(self, message: ComputeTask | EvaluateTask | WakeUp | None) -> None:
        """Send, or notice later, when the end of the pipe is read, that the process is gone."""
        with suppress(OSError):
            self.connection.send(message)


class LocalEngine(WallClockEngine[_Peer]):
    """One process a worker, and one that evaluates, on memory that they share.

    Args:
        job: what to train.
        cluster: how many workers, on what, and how slow.
        seed: of the run.
        server: owns the parameters.
        layout: of the model.
    """

    def __init__(self, job: Job, cluster: LocalCluster, seed: int, server: ParameterServer, layout: FlatLayout) -> None:
        n = cluster.n
        # Each worker may hold what it computes on, what it has not yet said to have abandoned, and what a gradient
        # was computed at that the coordinator has yet to hear of.
        self._memory = SharedMemory(layout, workers=n, places=3 * n + 4)
        self._places = iter(range(3 * n + 4))
        gradients = [self._memory.gradient(layout, worker) for worker in range(n)]
        super().__init__(server, VersionStore(self._new_place), gradients, debug=cluster.debug)
        self._job = job
        self._cluster = cluster
        self._seed = seed
        self._layout = layout
        self._launcher = Launcher([processes.__name__])
        self._evaluator: _Peer | None = None
        self._respawns = [0] * n
        self._gone_for_good: set[int] = set()
        self._parcel: SharedPickle | None = None

    def _start(self) -> None:
        self._parcel = self._pack()
        try:
            for worker in range(self._cluster.n):
                if self.signals.caught:
                    return
                self._workers[worker] = self._start_process(worker)
            if self._job.eval_data is not None:
                self._evaluator = self._start_process(self._cluster.n)
            for peer in self._peers():
                self._await_ready(peer)
        except RunError:
            if not self.signals.caught:  # which ends every process of a terminal or of a Slurm step
                raise

    # --- commands -----------------------------------------------------------------------------------------

    def _cancel_task(self, peer: _Peer, command: Interrupt) -> None:
        """Raise the worker's flag, which it looks at between layers, and wake it if it sleeps."""
        self._memory.interrupt(command.worker, command.draw)
        peer.send(WakeUp())

    def replace(self, command: RestartWorker) -> None:
        """End a worker's process, if another one will start in its place."""
        peer = self._workers[command.worker]
        if self._cluster.respawn and peer.is_ready:
            peer.is_replaced = True
            peer.process.kill()

    def evaluate(self, command: Evaluate) -> None:
        """Send the version to the process that evaluates."""
        assert self._evaluator is not None
        version = self._versions.acquire(command.version)
        assert isinstance(version, SharedVectors)
        self._evaluator.send(EvaluateTask(command.version, version.place))

    # --- events -------------------------------------------------------------------------------------------

    def _send(self, peer: _Peer, command: Compute) -> None:
        version = self._versions[command.version]
        assert isinstance(version, SharedVectors)
        peer.send(
            ComputeTask(
                command.draw, command.version, version.place, command.minibatch, self._elapsed_s(), time.monotonic()
            )
        )

    def _read(self, key: selectors.SelectorKey) -> None:
        worker: int = key.data
        peer = self._evaluator if worker == self._cluster.n else self._workers[worker]
        assert peer is not None
        try:
            reply = peer.connection.recv()
        except (EOFError, OSError):
            self._gone(worker, peer)
            return
        now = self._elapsed_s()
        match reply:
            case TaskDone():
                self._respawns[worker] = 0
                push_s = now + self._begun_s - reply.sent_s  # not beyond the moment of the arrival
                self._arrived(worker, reply.draw, reply.measured, pull_s=reply.pull_s, push_s=push_s)
            case TaskCancelled():
                self._next(peer)
            case WorkerReady():
                peer.is_ready = True
                self._events.append(Joined(now, worker))
            case EvaluationDone():
                self._versions.release(reply.version)
                self._events.append(Evaluated(now, reply.version, reply.metrics))
            case TaskFailed():
                if reply.is_usage:
                    raise UsageError(reply.message)
                if worker == self._cluster.n:
                    LOG.error("the evaluation failed:\n%s", reply.details.rstrip())
                    raise RunError(f"the evaluation failed: {reply.message}")
                LOG.error("worker %d failed:\n%s", worker, reply.details.rstrip())

    def _gone(self, worker: int, peer: _Peer) -> None:
        reason = self._reap(peer)
        if worker == self._cluster.n:
            raise RunError(f"the process that evaluates ended: {reason}")
        self._lost(worker, peer, reason)
        if self._cluster.respawn and self._respawns[worker] < RESPAWNS_WITHOUT_A_GRADIENT:
            self._respawns[worker] += 1
            self._workers[worker] = self._start_process(worker)
            return
        self._gone_for_good.add(worker)
        if len(self._gone_for_good) == self._cluster.n:
            self._events.append(AbortRun(self._elapsed_s(), Outcome.NO_WORKERS, "every worker process is gone"))

    def _use_idle_cores(self) -> None:
        """Let the server compute on the cores that no worker uses: threads on a busy core only wait for each other."""
        busy = sum(peer.working is not None for peer in self._workers.values()) * self._cluster.worker_threads
        torch.set_num_threads(max(1, cores() - busy))

    # --- processes ----------------------------------------------------------------------------------------

    def _peers(self) -> list[_Peer]:
        return [*self._workers.values(), *([self._evaluator] if self._evaluator else [])]

    def _new_place(self) -> SharedVectors:
        return self._memory.version(self._layout, next(self._places))

    def _pack(self) -> SharedPickle:
        job, cluster = self._job, self._cluster
        task = processes.WorkerSpec(job, cluster, self._seed, ProcessSettings.capture())
        return pickled(task, {**vars(job), "cluster": cluster}, f"job {job.name} cannot be sent to worker processes")

    def _start_process(self, worker: int) -> _Peer:
        ours, theirs = self._launcher.pipe()
        target = processes.evaluate if worker == self._cluster.n else processes.work
        assert self._parcel is not None
        has_children = worker < self._cluster.n and self._job.loader_workers > 0
        assignment = processes.Assignment(self._parcel, worker, self._memory, theirs)
        with closing(theirs):
            process = self._launcher.start(target, assignment, has_children=has_children)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return _Peer(process, ours)

    def _await_ready(self, peer: _Peer) -> None:
        wait([peer.connection, self.signals.reader])
        if self.signals.caught:
            return
        try:
            reply = peer.connection.recv()
        except (EOFError, OSError):
            reason = self._reap(peer)
            raise RunError(f"a worker process ended while it started: {reason}") from None
        if isinstance(reply, TaskFailed):
            if reply.is_usage:
                raise UsageError(reply.message)
            LOG.error("a worker process failed while it started:\n%s", reply.details.rstrip())
            raise RunError(f"a worker process failed while it started: {reply.message}")
        peer.is_ready = True

    def _reap(self, peer: _Peer) -> str:
        """Take the remains of a process away and say how it ended."""
        self._selector.unregister(peer.connection)
        peer.connection.close()
        peer.process.join(GRACE_S)
        code = peer.process.exitcode
        if peer.is_replaced:
            return "replaced by another one"
        if code is None:
            peer.process.kill()
            return "its pipe closed"
        return describe_exit(code)

    def _close(self, error: BaseException | None) -> None:
        for worker, peer in self._workers.items():
            self._memory.interrupt(worker, sys.maxsize)
            peer.send(None)
        if self._evaluator is not None:
            self._evaluator.process.kill()
        deadline_s = time.monotonic() + GRACE_S
        for peer in self._peers():
            peer.process.join(max(0.0, deadline_s - time.monotonic()))
            if peer.process.is_alive():
                peer.process.kill()
                peer.process.join()
            peer.connection.close()
        self._selector.close()
        self._memory.close()
        if self._parcel is not None:
            self._parcel.close()
