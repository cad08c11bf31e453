"""Worker process: computes gradients, or evaluates, for rank 0 until the run ends."""

from __future__ import annotations

import queue
import sys
import threading
import time
from contextlib import ExitStack, closing
from secrets import token_hex
from typing import Any

from torch import Tensor

from paceline.core.gradient import Measured
from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.announced_sums.shard_group import ShardGroup
from paceline.engines.distributed.announced_sums.summed_tensors import SummedTensors
from paceline.engines.distributed.node_worker.leader import NodeLeader
from paceline.engines.distributed.node_worker.node_group import NodeGroupLost
from paceline.engines.distributed.parameter_server.joined_servers import join_servers
from paceline.engines.distributed.parameter_server.server_tensors import ServerTensors
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.handshake import RunFinished
from paceline.engines.distributed.rendezvous.session import (
    ClientSession,
    FinalState,
    ServerLostError,
    describe_process,
    final_state,
    raising_run_error,
)
from paceline.engines.distributed.transport import messages, standby_messages, task_messages
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.step_options import StepOptions
from paceline.engines.distributed.worker_tensors import Recomputation, Task, WorkerTensors
from paceline.engines.notice_watch import NoticeWatch
from paceline.engines.worker_checkpoints import WorkerCheckpoints
from paceline.errors import RunError, UsageError
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.utils.rank_logger import RankLogger
from paceline.utils.user_code import note_place
from paceline.worker.gradient_source import Interrupted
from paceline.worker.minibatch_forecast import following
from paceline.worker.replica import Replica
from paceline.worker.task_runner import TaskRunner, gpu_of

LOG = RankLogger(__name__)
ALL_DRAWS = sys.maxsize
# A task comes with its version, and the time at which both were there.
Request = tuple[Task, FlatBuffers, float] | messages.Leave | FinalState | Exception


def work(rank: Rank, job_spec: dict[str, Any]) -> FinalState:
    """Take part in the run of rank 0 until it ends.

    Args:
        rank: settings of this process.
        job_spec: settings that must be equal on all processes.

    Raises:
        UsageError: rank 0 rejects this process, or the job cannot work.
        RunError: rank 0 is gone, or its run has failed.
        RunFinished: the run ended before this process took part.
        SystemExit: this process was asked to end, and has sent what it had.
    """
    cluster = rank.cluster
    rank.host.lifecycle.set_num_threads(cluster.worker_threads)
    worker = WorkerProcess(rank)
    try:
        with raising_run_error(cluster.server_name), ExitStack() as open_sessions:
            worker.leader.gather(job_spec)
            final = None
            while final is None:
                joined = join_servers(cluster, rank.transport, worker.hello(job_spec), worker.standby)
                sessions = [open_sessions.enter_context(closing(each)) for each in joined]
                try:
                    final = worker.run(sessions)
                except (ConnectionLost, ServerLostError) as error:
                    if worker.standby is None:
                        raise
                    LOG.warning("%s; %s joins the standby", error, cluster.worker_name)
                    open_sessions.close()
                    worker.disconnect()
            worker.leader.finish(final)
            return final
    finally:
        worker.leader.close()
        worker.close()


class WorkerProcess:
    """Worker, or evaluator, of a parameter server.

    Args:
        rank: settings of this process.

    Attributes:
        standby: host and port of the standby, which this worker joins if it loses the server; None without one.
    """

    def __init__(self, rank: Rank) -> None:
        job, cluster, seed = rank.job, rank.cluster, rank.seed
        self._cluster = cluster
        self._lifecycle = rank.host.lifecycle
        self._worker = cluster.worker
        self._name = cluster.worker_name
        self._leaving_status = cluster.leaving_status
        self._notice = cluster.notice if cluster.worker < cluster.n else None  # rank 0 ends the evaluator
        self._workers = cluster.n
        self._ahead = job.minibatches_ahead
        self.leader = NodeLeader(
            cluster,
            rank.transport,
            self._is_cancelled,
            self._leave,
            self._on_group_lost,
            makes_local_steps=rank.plan.local_steps is not None,
        )
        self._shards: ShardGroup | None = None  # of the replica
        if cluster.group_size > 1:
            self._shards = ShardGroup(cluster.shard_of_replica, cluster.group_size, self._is_cancelled)
        self._replica = self._make_replica(rank)
        faults = tuple(cluster.faults)
        actions = rank.host.lifecycle.fault_actions
        self._task_runner = TaskRunner(
            replica=self._replica,
            worker=self._worker,
            slowness=cluster.slowness,
            seed=seed,
            faults=faults,
            sleep=self._sleep,
            fault_actions=actions,
        )
        self._process = token_hex(16)  # a standby counts processes, and another one may get this number (decision 0026)
        self.standby: tuple[str, int] | None = None
        self._version = -1
        self._tensors = self._make_tensors(rank)
        self._checkpoints = WorkerCheckpoints(rank.folder, self._worker, self._replica, self._tensors.left_out)
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()  # safe in a signal handler
        self._draw = 0
        self._received_s = 0.0  # arrival of the task
        self._cancelled = 0  # newest draw that was cancelled
        self._unneeded = 0  # newest draw whose gradient cannot be used any more
        self._wake_up = threading.Event()  # ends a sleep
        self._has_failed = True  # until the run has ended well

    def _make_replica(self, rank: Rank) -> Replica:
        """Return the replica, which tells when a gradient is complete if it computes whole ones."""
        cluster, local_steps = rank.cluster, rank.plan.local_steps
        group = self._shards or (self.leader.group if self.leader.group.size > 1 else None)
        replica = rank.host.make_replica(
            rank.job,
            rank.seed,
            cluster.n,
            local_steps=local_steps,
            group=group,
            device=rank.device,
            debug=cluster.debug,
            shards=cluster.shards,
        )
        if group is None and self._worker < cluster.n:  # an evaluation is not interrupted
            replica.set_check(self._check)
        if group is None and local_steps is None:
            replica.on_gradient_ready = self._on_accumulated
        replica.is_bound_to_server = local_steps is None
        return replica

    def _make_tensors(self, rank: Rank) -> WorkerTensors:
        """Return the way of versions and gradients; the evaluator gets versions of rank 0 in any case."""
        cluster, is_worker = rank.cluster, self._worker < rank.cluster.n
        if is_worker and not cluster.has_server:
            return SummedTensors(rank, self._replica, self._shards)
        wire = cluster.wire if is_worker else "float32"  # an evaluation is exact
        return ServerTensors(self._replica, wire, is_pinned=self._replica.device.type == "cuda")

    def hello(self, job_spec: dict[str, Any]) -> messages.Hello:
        """Return the introduction of this process to rank 0, or its standby.

        Args:
            job_spec: settings that must be equal on all processes.
        """
        return messages.Hello.of(
            describe_process(self._name, self._cluster),
            self._worker,
            job_spec,
            gpu=gpu_of(self._replica.device),
            shard=self._cluster.shard_of_replica,
            process=self._process,
            version=self._version,
        )

    def run(self, sessions: list[ClientSession]) -> FinalState:
        """Carry out all requests until the end of the run.

        Args:
            sessions: connections to the server of each shard, of which the first one is rank 0.
        """
        self._requests = queue.SimpleQueue()
        self._draw = self._cancelled = self._unneeded = 0
        self._session = sessions[0]
        self._tensors.use(sessions, self._on_task, self._on_error)
        self._session.listen(self._on_message, self._on_error)
        send = self._session.connection.send
        self._lifecycle.on_joined(lambda reason: send(messages.Pause(reason)), lambda: send(messages.Resume()))
        with self._lifecycle.leaving_on_sigterm(self._leave), NoticeWatch(self._notice, self._leave):
            while True:
                request = self._requests.get()
                if isinstance(request, FinalState):
                    self._checkpoints.at_end()
                    self._has_failed = request.end.has_failed
                    return request
                if isinstance(request, Exception) and not isinstance(request, NodeGroupLost):
                    raise request
                try:
                    self._carry_out(request)
                except (ConnectionLost, SystemExit):
                    raise
                except NodeGroupLost as error:
                    raise self._group_error() from error
                except Exception as error:
                    self._session.fail(error)
                    raise

    def disconnect(self) -> None:
        """End the use of the connections to rank 0, which is lost."""
        self._version = self._tensors.disconnect()

    def close(self) -> None:
        """Wait for the threads; the connections are closed by then."""
        self._tensors.close(has_failed=self._has_failed)
        self._replica.close()

    def _carry_out(self, request: Request) -> None:
        match request:
            case task_messages.RemoteTask() as task, version, received_s:
                self._compute(task, version, received_s)
            case Recomputation() as again, version, _:
                self._recompute(again, version)
            case task_messages.RemoteEvaluateTask(number), version, _:
                metrics = self._replica.evaluate(version)
                self._session.connection.send(task_messages.EvaluationResult.of(number, metrics))
            case messages.Leave(reason):
                LOG.warning("%s leaves the run: %s", self._name, reason)
                self._checkpoints.at_end()
                self.leader.shut_down(messages.Shutdown(self._leaving_status))
                self._session.finish(request)
                raise SystemExit(self._leaving_status)
            case Exception():
                raise request

    def _compute(self, task: task_messages.RemoteTask, version: FlatBuffers, received_s: float) -> None:
        self._draw = task.draw
        self._received_s = received_s
        self._tensors.begin(task.draw)
        if task.sends_version:
            self.leader.on_change()
        self._check_version(task, "before")
        minibatch, upcoming = task.minibatches(self._workers, self._ahead)
        self._replica.prefetch(following(self._worker, task.draw, upcoming))
        self._replica.progress = task.progress
        self._checkpoints.before_task(task.draw)
        try:
            gradient = self._tensors.gradient
            measured = self._task_runner.gradient(task.draw, minibatch, task.run_s, version, gradient)
        except Interrupted:
            self._tensors.cancel(task.draw)
        except Exception as error:
            note_place(error, f"after update {task.version}")
            raise
        else:
            self._check_version(task, "after")
            self._send_gradient(measured)

    def _recompute(self, again: Recomputation, version: FlatBuffers) -> None:
        """Compute the gradient of a lost worker, which counts."""
        self._draw = ALL_DRAWS  # only the end of the run cancels it
        self._replica.prefetch(())
        lost = again.lost
        self._replica.progress = self._replica.progress._replace(step_place=lost.step_place)
        try:
            self._task_runner.lost_gradient(
                worker=lost.worker,
                draw=lost.draw,
                minibatch=lost.decoded,
                run_s=lost.run_s,
                version=version,
                gradient=again.gradient,
            )
        except Interrupted:
            again.finish(False)
        else:
            again.finish(True)

    def _on_accumulated(self, parameter: int, gradient: Tensor | None = None) -> Tensor | None:
        return self._tensors.on_accumulated(parameter, self._busy_s, gradient) if self._is_needed else None

    def _send_gradient(self, measured: Measured) -> None:
        """Tell that the gradient is complete."""
        is_needed = self._is_needed  # read once, since another thread changes it

        def done(measured: Measured) -> task_messages.RemoteTaskDone:
            return task_messages.RemoteTaskDone(
                draw=self._draw,
                busy_s=self._busy_s,
                measured=measured,
                options=StepOptions(self._replica.learning_rates, self._replica.options).encode(),
                missing=IndexBits.of(self._tensors.gradient.missing).content,
                is_notice=not is_needed,
            )

        self._tensors.end(measured, done, is_needed=is_needed)

    @property
    def _is_needed(self) -> bool:
        return self._unneeded < self._draw

    @property
    def _busy_s(self) -> float:
        return time.monotonic() - self._received_s

    def _check_version(self, task: task_messages.RemoteTask, when: str) -> None:
        """Compare the version with the server's, in debug mode."""
        at = f"{when} its draw {task.draw}, of version {task.version}"
        self._tensors.check(task.checksum, f"worker {self._worker}", at)

    def _is_cancelled(self) -> bool:
        return self._cancelled >= self._draw

    def _check(self) -> None:
        if self._is_cancelled():
            raise Interrupted

    def _sleep(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self._check()
            self._wake_up.wait(left_s)
            self._wake_up.clear()
        self._check()

    # --- callbacks, from the thread of the sockets --------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        if self._tensors.on_message(message):
            return
        match message:
            case task_messages.CancelTask(draw):
                self._cancel(draw)
            case task_messages.GradientUnneeded(draw):
                self._unneeded = draw
            case standby_messages.StandbyAddress(host, port) if self._worker < self._workers:
                self.standby = host, port
            case standby_messages.StandbyLost():
                self.standby = None  # so it no longer counts for the standby (decision 0026)
                self._session.connection.send(standby_messages.StandbyForgotten())
            case messages.End() as end:
                if end.tensors:
                    self._requests.put(final_state(end, self._replica.layout))
                    self._cancel(ALL_DRAWS)
                else:
                    self._requests.put(RunFinished(end))

    def _on_task(self, task: Task, version: FlatBuffers, received_s: float) -> None:
        if isinstance(task, messages.End):
            self._requests.put(FinalState(version, task))
            self._cancel(ALL_DRAWS)
        else:
            self._requests.put((task, version, received_s))

    def _on_error(self, error: Exception) -> None:
        self._requests.put(error)
        self._cancel(ALL_DRAWS)

    def _cancel(self, draw: int) -> None:
        self._cancelled = draw
        self._wake_up.set()

    def _leave(self, reason: str) -> None:
        self._replica.is_leaving = True
        self._requests.put(messages.Leave(reason))

    def _on_group_lost(self) -> None:
        self._on_error(NodeGroupLost("a process of this worker is gone"))

    def _group_error(self) -> UsageError | RunError:
        """Report to rank 0 why another process of this worker has ended."""
        reason = self.leader.loss()
        self._session.finish(reason)
        return reason.error if isinstance(reason, messages.Failed) else RunError(reason.reason)
