"""Worker processes on one machine, and one for evaluation."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from paceline.clusters.devices import cores
from paceline.clusters.local import LocalCluster
from paceline.coordinator.coordinator import Coordinator
from paceline.core import events
from paceline.engines.local import messages
from paceline.engines.local import worker_process as processes
from paceline.engines.ports import Workers
from paceline.engines.real_clock import RealClock
from paceline.engines.server_side import ServerSide
from paceline.engines.signals import Signals
from paceline.engines.task_board import TaskBoard
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
from paceline.worker.task_progress import TaskProgress

LOG = RankLogger(__name__)

RESPAWNS_WITHOUT_A_GRADIENT = 3
GRACE_S = 2.0
SAVING_GRACE_S = 60.0  # for workers that save their state


class _Peer:
    """Process of the run, with its pipe."""

    def __init__(self, process: ForkServerProcess, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.is_replaced = False  # killed by `restart`, so that another one takes its place

    def send(self, message: messages.ComputeTask | messages.EvaluateTask | messages.WakeUp | None) -> None:
        """Send a message; the loss of the process is noticed when its pipe is read."""
        with suppress(OSError):
            self.connection.send(message)


class LocalWorkers(Workers):
    """One process per worker and one for evaluation, in shared memory.

    Args:
        job: job to train.
        cluster: workers, their device and their injected slowness and faults.
        seed: seed of the run, >= 0.
        server: owner of the parameters.
        layout: layout of the model.
        local_steps: local steps of each worker's work; None for one gradient.
        folder: folder of the run; None for a run without one.

    Attributes:
        clock: clock of the run.
        parameters: parameters of the run, in shared memory.

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
        self.clock = RealClock()
        self.parameters = ServerSide(
            server,
            VersionStore(self._new_slot),
            gradients,
            allocate=layout.allocate,
            debug=cluster.debug,
            deterministic=cluster.deterministic,
        )
        self._versions = self.parameters.versions
        self._tasks = TaskBoard(self.parameters, self._send)
        self._job = job
        self._cluster = cluster
        self._seed = seed
        self._layout = layout
        self._local_steps = local_steps
        self._folder = folder
        self._threads = torch.get_num_threads()
        self._launcher = Launcher([processes.__name__])
        self._workers: dict[int, _Peer] = {}
        self._evaluator: _Peer | None = None
        self._saved_draws: Mapping[int, int] = {}  # newest accepted draw of each worker in the newest checkpoint
        self._respawns = [0] * n
        self._lost_for_good: set[int] = set()
        self._failed: set[int] = set()  # workers whose latest process has ended by an exception
        self._first_failure: messages.TaskFailed | None = None
        self._spec: SharedPickle | None = None

    def meet(self, coordinator: Coordinator) -> None:
        """Do nothing: workers know no more than their tasks."""

    def start(self, signals: Signals) -> bool:
        """Start the processes, and wait until they are ready or a signal is caught."""
        self._spec = self._pack()
        try:
            for worker in range(self._cluster.n):
                if signals.caught:
                    return False
                self._workers[worker] = self._start_process(worker)
            if self._job.eval_data is not None:
                self._evaluator = self._start_process(self._cluster.n)
            for peer in self._peers():
                self._await_ready(peer, signals)
        except RunError:
            if not signals.caught:  # it ends all processes of a terminal or of a Slurm step
                raise
        for worker in self._workers:
            self._tasks[worker].is_ready = not signals.caught
        return not signals.caught

    # --- commands -----------------------------------------------------------------------------------------

    def compute(self, command: events.Compute) -> None:
        """Give a worker a task."""
        self._tasks.assign(command)

    def interrupt(self, command: events.Interrupt) -> None:
        """Cancel a task: set the worker's flag, which it checks between layers, and wake it if it sleeps."""
        if self._tasks.cancels(command):
            self._memory.interrupt(command.worker, command.draw)
            self._workers[command.worker].send(messages.WakeUp())

    def restart(self, command: events.RestartWorker) -> None:
        """Kill a worker's process, if another one will start in its place."""
        if self._cluster.respawn and self._tasks[command.worker].is_ready:
            peer = self._workers[command.worker]
            peer.is_replaced = True
            peer.process.kill()

    def evaluate(self, command: events.Evaluate) -> None:
        """Send the version to the evaluation process."""
        assert self._evaluator is not None
        version = self._versions.acquire(command.version)
        assert isinstance(version, SharedBuffers)
        self._evaluator.send(messages.EvaluateTask(command.version, version.slot))

    def accepted(self, command: events.Accept) -> None:
        """Do nothing: a worker learns it with its next task."""

    def updating(self, command: events.Apply) -> None:
        """Let the server use idle cores for the step."""
        self._lend_cores()

    def on_commands(self) -> None:
        """Do nothing, as `accepted`."""

    def on_idle(self) -> None:
        """Let the server use idle cores for the work that it does ahead."""
        # Not after each event: changing the threads between gradients that arrive together took a third of an update.
        self._lend_cores()

    def ended(self, command: events.EndRun) -> None:
        """Do nothing: processes are ended by `close`."""

    def save_after(self, draws: Mapping[int, int]) -> None:
        """Let each worker save its state after this draw, with its next task."""
        self._saved_draws = draws

    def _lend_cores(self) -> None:
        """Use as many threads as there are cores without a worker: two threads on one core wait for each other."""
        torch.set_num_threads(max(1, cores() - self._tasks.busy * self._cluster.worker_threads))

    def _send(self, command: events.Compute) -> None:
        version = self._versions[command.version]
        assert isinstance(version, SharedBuffers)
        self._workers[command.worker].send(
            messages.ComputeTask(
                draw=command.draw,
                version=command.version,
                slot=version.slot,
                minibatch=command.minibatch,
                progress=TaskProgress.of(command, saved=self._saved_draws.get(command.worker, 0)),
                run_s=self.clock.elapsed_s(),
                sent_s=time.monotonic(),
            )
        )

    # --- events -------------------------------------------------------------------------------------------

    def _read(self, worker: int, peer: _Peer) -> None:
        try:
            reply = peer.connection.recv()
        except (EOFError, OSError):
            self._gone(worker, peer)
            return
        now = self.clock.elapsed_s()
        match reply:
            case messages.TaskDone():
                self._respawns[worker] = 0
                push_s = time.monotonic() - reply.sent_s  # at most until the arrival
                arrival = events.Arrival(now, worker, reply.draw, reply.measured, pull_s=reply.pull_s)
                self.clock.add(arrival._replace(push_s=push_s))
                self._tasks.on_gradient(worker, reply.missing)
            case messages.TaskCancelled():
                self._tasks.on_idle(worker)
            case messages.WorkerReady():
                self._tasks[worker].is_ready = True
                self.clock.add(events.Joined(now, worker))
            case messages.EvaluationDone():
                self._versions.release(reply.version)
                self.clock.add(events.Evaluated(now, reply.version, reply.metrics))
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

    def _gone(self, worker: int, peer: _Peer) -> None:
        reason = self._reap(peer)
        if worker == self._cluster.n:
            raise RunError(f"the evaluation process ended: {reason}")
        self._tasks.on_lost(worker)
        self.clock.add(events.Lost(self.clock.elapsed_s(), worker, reason))
        if self._cluster.respawn and self._respawns[worker] < RESPAWNS_WITHOUT_A_GRADIENT:
            self._respawns[worker] += 1
            self._failed.discard(worker)
            self._workers[worker] = self._start_process(worker)
            return
        self._lost_for_good.add(worker)
        if len(self._lost_for_good) < self._cluster.n:
            return
        if self._failed == self._lost_for_good and self._first_failure is not None:
            error = RunError(f"every worker failed, the first one with: {self._first_failure.message}")
            error.__cause__ = RemoteTracebackError(self._first_failure.details)
            self.clock.fail_after_events(error)  # so that the log of the run has all losses
        else:
            reason = "every worker process has ended"
            self.clock.add(events.AbortRun(self.clock.elapsed_s(), events.Outcome.NO_WORKERS, reason))

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
        with closing(theirs):  # else the pipe of a process that has ended would stay open
            process = self._launcher.start(target, arguments, has_children=has_children)
        peer = _Peer(process, ours)
        self.clock.watch(ours, partial(self._read, worker, peer))
        return peer

    def _await_ready(self, peer: _Peer, signals: Signals) -> None:
        wait([peer.connection, signals.reader])
        if signals.caught:
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

    def _reap(self, peer: _Peer) -> str:
        """Join a process that has ended, and return how it ended."""
        self.clock.unwatch(peer.connection)
        peer.connection.close()
        peer.process.join(GRACE_S)
        code = peer.process.exitcode
        if peer.is_replaced:
            return "replaced by another one"
        if code is None:
            peer.process.kill()
            return "its pipe closed"
        return describe_exit(code)

    def close(self, error: BaseException | None) -> None:
        """End the processes; workers with a state of their own may save it before."""
        torch.set_num_threads(self._threads)
        for worker, peer in self._workers.items():
            self._memory.interrupt(worker, sys.maxsize)  # of any draw, also one that it has not begun
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
        self._memory.close()
        if self._spec is not None:
            self._spec.close()
