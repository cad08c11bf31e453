"""Engine of worker processes on one machine."""

from __future__ import annotations

import selectors
import sys
import time
from contextlib import closing, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from paceline.clusters.devices import cores
from paceline.clusters.local import LocalCluster
from paceline.core import events
from paceline.engines.local import messages
from paceline.engines.local import worker_process as processes
from paceline.engines.worker_pool import PoolWorker, WorkerPoolEngine
from paceline.errors import RunError, UsageError
from paceline.jobs.job import Job
from paceline.processes.child_process import Launcher, ProcessSettings, describe_exit
from paceline.processes.shared_memory import SharedBuffers, SharedMemory
from paceline.processes.shared_pickle import SharedPickle
from paceline.processes.unpicklable import pickled
from paceline.protocols.local_steps import LocalSteps
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from paceline.tensors.version_store import VersionStore
from paceline.utils.rank_logger import RankLogger
from paceline.utils.user_code import RemoteTracebackError

LOG = RankLogger(__name__)

RESPAWNS_WITHOUT_A_GRADIENT = 3
GRACE_S = 2.0
SAVING_GRACE_S = 60.0  # for workers that save their state


class _Peer(PoolWorker):
    """Process of the run, with its pipe."""

    def __init__(self, process: ForkServerProcess, connection: Connection) -> None:
        super().__init__()
        self.process = process
        self.connection = connection
        self.is_replaced = False  # killed by the engine, so that another one takes its place

    def send(self, message: messages.ComputeTask | messages.EvaluateTask | messages.WakeUp | None) -> None:
        """Send a message; the loss of the process is noticed when its pipe is read."""
        with suppress(OSError):
            self.connection.send(message)


class LocalEngine(WorkerPoolEngine[_Peer]):
    """Engine with one process per worker and one for evaluation, in shared memory.

    Args:
        job: job to train.
        cluster: workers, their device and their injected slowness and faults.
        seed: seed of the run, >= 0.
        server: owner of the parameters.
        layout: layout of the model.
        local_steps: local steps of each worker's work; None for one gradient.
        folder: folder of the run; None for a run without one.

    Raises:
        RunError: the evaluation failed, a process did not start, or the user's code failed in every worker.
    """

    def __init__(
        self,
        job: Job,
        cluster: LocalCluster,
        seed: int,
        server: ParameterServer,
        layout: FlatLayout,
        local_steps: LocalSteps | None = None,
        folder: str | Path | None = None,
    ) -> None:
        n = cluster.n
        # Each worker may reference three versions: that of its task, that of a cancelled task that it has not answered,
        # and that of a gradient that the coordinator has not handled.
        self._memory = SharedMemory(layout, workers=n, slots=3 * n + 4)
        self._slots = iter(range(3 * n + 4))
        gradients = [self._memory.gradient(layout, worker) for worker in range(n)]
        super().__init__(server, VersionStore(self._new_slot), gradients, debug=cluster.debug)
        self._job = job
        self._cluster = cluster
        self._seed = seed
        self._layout = layout
        self._local_steps = local_steps
        self._folder = folder
        self._launcher = Launcher([processes.__name__])
        self._evaluator: _Peer | None = None
        self._respawns = [0] * n
        self._lost_for_good: set[int] = set()
        self._failed: set[int] = set()  # workers whose latest process has ended by an exception
        self._first_failure: messages.TaskFailed | None = None
        self._error: RunError | None = None  # to be raised once all events are handled
        self._spec: SharedPickle | None = None

    def _start_workers(self) -> None:
        self._spec = self._pack()
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
            if not self.signals.caught:  # it ends all processes of a terminal or of a Slurm step
                raise

    # --- commands -----------------------------------------------------------------------------------------

    def _cancel_task(self, peer: _Peer, command: events.Interrupt) -> None:
        """Set the worker's flag, which it checks between layers, and wake it if it sleeps."""
        self._memory.interrupt(command.worker, command.draw)
        peer.send(messages.WakeUp())

    def restart_worker(self, command: events.RestartWorker) -> None:
        """Kill a worker's process, if another one will start in its place."""
        peer = self._workers[command.worker]
        if self._cluster.respawn and peer.is_ready:
            peer.is_replaced = True
            peer.process.kill()

    def evaluate(self, command: events.Evaluate) -> None:
        """Send the version to the evaluation process."""
        assert self._evaluator is not None
        version = self._versions.acquire(command.version)
        assert isinstance(version, SharedBuffers)
        self._evaluator.send(messages.EvaluateTask(command.version, version.slot))

    # --- events -------------------------------------------------------------------------------------------

    def _send(self, peer: _Peer, command: events.Compute) -> None:
        version = self._versions[command.version]
        assert isinstance(version, SharedBuffers)
        task = messages.ComputeTask(
            draw=command.draw,
            version=command.version,
            slot=version.slot,
            minibatch=command.minibatch,
            progress=self._progress(command),
            run_s=self._elapsed_s(),
            sent_s=time.monotonic(),
        )
        peer.send(task)

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
            case messages.TaskDone():
                self._respawns[worker] = 0
                push_s = now + self._begun_s - reply.sent_s  # at most until the arrival
                self._on_gradient(worker, reply.draw, reply.measured, reply.missing, pull_s=reply.pull_s, push_s=push_s)
            case messages.TaskCancelled():
                self._on_idle(peer)
            case messages.WorkerReady():
                peer.is_ready = True
                self._events.append(events.Joined(now, worker))
            case messages.EvaluationDone():
                self._versions.release(reply.version)
                self._events.append(events.Evaluated(now, reply.version, reply.metrics))
            case messages.TaskFailed():
                if reply.is_usage:
                    raise UsageError(reply.message)
                if worker == self._cluster.n:
                    LOG.error("the evaluation failed:\n%s", reply.details.rstrip())
                    raise RunError(f"the evaluation failed: {reply.message}")
                self._on_failure(worker, reply)

    def _on_failure(self, worker: int, failure: messages.TaskFailed) -> None:
        """Log the failure of a worker: the traceback of the first one, one line of each further one."""
        self._failed.add(worker)
        if self._first_failure is None:
            self._first_failure = failure
            LOG.error("worker %d failed:\n%s", worker, failure.details.rstrip())
        else:
            LOG.error("worker %d failed: %s", worker, failure.message)

    def next_event(self) -> events.Event:
        """Wait for a worker, a timer or a signal.

        Raises:
            RunError: the user's code has failed in every worker.
        """
        if self._error is not None and not self._events:
            raise self._error
        return super().next_event()

    def _gone(self, worker: int, peer: _Peer) -> None:
        reason = self._reap(peer)
        if worker == self._cluster.n:
            raise RunError(f"the evaluation process ended: {reason}")
        self._on_lost(worker, peer, reason)
        if self._cluster.respawn and self._respawns[worker] < RESPAWNS_WITHOUT_A_GRADIENT:
            self._respawns[worker] += 1
            self._failed.discard(worker)
            self._workers[worker] = self._start_process(worker)
            return
        self._lost_for_good.add(worker)
        if len(self._lost_for_good) < self._cluster.n:
            return
        if self._failed == self._lost_for_good and self._first_failure is not None:
            self._error = RunError(f"every worker failed, the first one with: {self._first_failure.message}")
            self._error.__cause__ = RemoteTracebackError(self._first_failure.details)
        else:
            self._events.append(
                events.AbortRun(self._elapsed_s(), events.Outcome.NO_WORKERS, "every worker process has ended")
            )

    def _use_idle_cores(self) -> None:
        """Use as many threads as there are cores without a worker: two threads on one core wait for each other."""
        busy = sum(peer.working is not None for peer in self._workers.values()) * self._cluster.worker_threads
        torch.set_num_threads(max(1, cores() - busy))

    # --- processes ----------------------------------------------------------------------------------------

    def _peers(self) -> list[_Peer]:
        return [*self._workers.values(), *([self._evaluator] if self._evaluator else [])]

    def _new_slot(self) -> SharedBuffers:
        return self._memory.version(self._layout, next(self._slots))

    def _pack(self) -> SharedPickle:
        job, cluster = self._job, self._cluster
        spec = processes.WorkerSpec(
            job=job,
            cluster=cluster,
            seed=self._seed,
            settings=ProcessSettings.capture(),
            local_steps=self._local_steps,
            folder=self._folder,
        )
        return pickled(spec, {**vars(job), "cluster": cluster}, f"job {job.name} cannot be sent to worker processes")

    def _start_process(self, worker: int) -> _Peer:
        ours, theirs = self._launcher.pipe()
        target = processes.evaluate if worker == self._cluster.n else processes.work
        assert self._spec is not None
        has_children = worker < self._cluster.n and self._job.loader_workers > 0
        arguments = processes.ProcessArguments(spec=self._spec, worker=worker, memory=self._memory, connection=theirs)
        with closing(theirs):
            process = self._launcher.start(target, arguments, has_children=has_children)
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
        if isinstance(reply, messages.TaskFailed):
            if reply.is_usage:
                raise UsageError(reply.message)
            LOG.error("a worker process failed while it started:\n%s", reply.details.rstrip())
            raise RunError(f"a worker process failed while it started: {reply.message}")
        peer.is_ready = True

    def _reap(self, peer: _Peer) -> str:
        """Join a process that has ended, and return how it ended."""
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
        saves = self._folder is not None and self._local_steps is not None
        deadline_s = time.monotonic() + (SAVING_GRACE_S if saves else GRACE_S)
        for peer in self._peers():
            peer.process.join(max(0.0, deadline_s - time.monotonic()))
            if peer.process.is_alive():
                peer.process.kill()
                peer.process.join()
            peer.connection.close()
        self._selector.close()
        self._server.publish(self._layout.allocate())  # the shared memory ends with the run
        self._memory.close()
        if self._spec is not None:
            self._spec.close()
