"""Worker process and evaluation process of the local engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from paceline.clusters.local import LocalCluster
from paceline.engines.local import messages
from paceline.engines.worker_checkpoints import WorkerCheckpoints
from paceline.jobs.job import Job
from paceline.processes.child_process import ProcessSettings, init_child
from paceline.processes.shared_memory import SharedMemory
from paceline.processes.shared_pickle import SharedPickle
from paceline.protocols.local_steps import LocalSteps
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.utils.user_code import at_place, failure_of, place_of
from paceline.utils.wording import first_line
from paceline.worker.gradient_source import Interrupted
from paceline.worker.local_steps import make_replica
from paceline.worker.replica import Replica
from paceline.worker.task_runner import FAULT_ACTIONS, TaskRunner, device_of, pin


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Arguments that all processes of a run share."""

    job: Job
    cluster: LocalCluster
    seed: int
    settings: ProcessSettings
    local_steps: LocalSteps | None = None
    folder: str | Path | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessArguments:
    """Arguments of one process.

    Attributes:
        spec: pickled `WorkerSpec`.
        worker: number of the worker; n for the evaluation process.
        memory: memory that all processes share.
        connection: pipe to the engine.
    """

    spec: SharedPickle
    worker: int
    memory: SharedMemory
    connection: Connection


class ChildProcess:
    """Process of the operating system in which a worker runs; tests replace it by a thread.

    Attributes:
        fault_actions: what a scripted fault does, by its kind.
    """

    fault_actions: Mapping[str, Callable[[], None]] = FAULT_ACTIONS

    def init(self) -> None:
        """Ignore Ctrl-C, and exit with the parent."""
        init_child()

    def apply(self, settings: ProcessSettings, threads: int) -> None:
        """Apply the settings of the parent, and set the number of threads that torch uses."""
        settings.apply()
        torch.set_num_threads(threads)


THIS_PROCESS = ChildProcess()


def work(arguments: ProcessArguments, process: ChildProcess = THIS_PROCESS) -> None:
    """Compute gradients until the engine ends the process."""
    _serve(arguments, process, lambda spec: _Worker(arguments, spec, process.fault_actions))


def evaluate(arguments: ProcessArguments, process: ChildProcess = THIS_PROCESS) -> None:
    """Evaluate versions until the engine ends the process."""
    _serve(arguments, process, lambda spec: _Evaluator(arguments, spec))


def _serve(
    arguments: ProcessArguments, process: ChildProcess, build: Callable[[WorkerSpec], _Worker | _Evaluator]
) -> None:
    process.init()
    connection = arguments.connection
    with ExitStack() as built:
        try:
            spec: WorkerSpec = arguments.spec.load()
            process.apply(spec.settings, spec.cluster.worker_threads)
            server = built.enter_context(closing(build(spec)))
            connection.send(messages.WorkerReady())
            while (request := connection.recv()) is not None:
                if not isinstance(request, messages.WakeUp):  # else its task has ended already
                    connection.send(server.answer(request))
            server.on_end()
        except (EOFError, ConnectionError):
            return  # the engine has ended
        except Exception as error:
            failure = failure_of(error)
            place, message = place_of(error), first_line(failure["failed"])
            message = f"{place}: {message}" if place else message
            connection.send(messages.TaskFailed(message, failure["details"], failure["is_usage"]))


class _Worker:
    def __init__(
        self, arguments: ProcessArguments, spec: WorkerSpec, fault_actions: Mapping[str, Callable[[], None]]
    ) -> None:
        job, cluster, seed = spec.job, spec.cluster, spec.seed
        self._worker = arguments.worker
        self._memory = arguments.memory
        self._connection = arguments.connection
        self._draw = 0
        device = device_of(cluster.device, self._worker)
        self._replica = make_replica(
            job, seed, cluster.n, local_steps=spec.local_steps, device=device, debug=cluster.debug
        )
        self._replica.set_check(self._check)
        self._replica.is_bound_to_server = spec.local_steps is None
        self._checkpoints = WorkerCheckpoints(spec.folder, self._worker, self._replica)
        self._gradient = self._memory.gradient(self._replica.layout, self._worker)
        self._versions: dict[int, FlatBuffers] = {}
        faults = tuple(cluster.faults)
        self._task_runner = TaskRunner(
            replica=self._replica,
            worker=self._worker,
            slowness=cluster.slowness,
            seed=seed,
            faults=faults,
            sleep=self._sleep,
            fault_actions=fault_actions,
        )
        if cluster.device == "cuda":
            pin(self._gradient)

    def answer(
        self, request: messages.ComputeTask | messages.EvaluateTask
    ) -> messages.TaskDone | messages.TaskCancelled:
        assert isinstance(request, messages.ComputeTask)
        begun_s = time.monotonic()
        self._draw = request.draw
        version = self._versions.get(request.slot)
        if version is None:
            version = self._memory.version(self._replica.layout, request.slot)
            self._versions[request.slot] = version
        self._replica.progress = request.progress
        self._checkpoints.before_task(request.draw)
        try:
            with at_place(f"after update {request.version}"):
                measured = self._task_runner.gradient(
                    request.draw, request.minibatch, request.run_s, version, self._gradient
                )
        except Interrupted:
            return messages.TaskCancelled(request.draw)
        pull_s = begun_s - request.sent_s
        return messages.TaskDone(
            draw=request.draw, measured=measured, pull_s=pull_s, sent_s=time.monotonic(), missing=self._gradient.missing
        )

    def on_end(self) -> None:
        """Save the state that only this worker has."""
        self._checkpoints.at_end()

    def close(self) -> None:
        """End the child processes of the replica."""
        self._replica.close()

    def _check(self) -> None:
        if self._memory.is_interrupted(self._worker, self._draw):
            raise Interrupted

    def _sleep(self, seconds: float) -> None:
        """Sleep until the time is over or a message arrives, which cancels the task or ends the process."""
        if self._connection.poll(seconds):
            raise Interrupted


class _Evaluator:
    def __init__(self, arguments: ProcessArguments, spec: WorkerSpec) -> None:
        cluster = spec.cluster
        self._memory = arguments.memory
        device = device_of(cluster.device, cluster.n)
        self._replica = Replica(spec.job, spec.seed, cluster.n, device=device)
        self._replica.is_bound_to_server = True

    def answer(self, request: messages.ComputeTask | messages.EvaluateTask) -> messages.EvaluationDone:
        assert isinstance(request, messages.EvaluateTask)
        version = self._memory.version(self._replica.layout, request.slot)
        return messages.EvaluationDone(request.version, self._replica.evaluate(version))

    def on_end(self) -> None:
        """Do nothing: an evaluator has no state of its own."""

    def close(self) -> None:
        """Do nothing: there are no child processes."""
