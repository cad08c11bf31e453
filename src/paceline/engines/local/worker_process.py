"""A worker process, and the process that evaluates."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from paceline.clusters.local import LocalCluster
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
from paceline.jobs.job import Job
from paceline.processes.child_process import ProcessSettings, init_child
from paceline.processes.shared_memory import SharedMemory
from paceline.processes.shared_pickle import SharedPickle
from paceline.server.flat_buffers import FlatBuffers
from paceline.utils.user_code import failure_of, note_place
from paceline.worker.replica import Interrupted, Replica
from paceline.worker.task_runner import TaskRunner, device_of, pin


@dataclass(frozen=True)
class WorkerSpec:
    """What all processes of a run have in common."""

    job: Job
    cluster: LocalCluster
    seed: int
    surroundings: ProcessSettings


@dataclass(frozen=True)
class Assignment:
    """What one process needs.

    Attributes:
        task: pickled `WorkerSpec`.
        worker: its number; the process that evaluates has none of the workers'.
        connection: to the engine.
    """

    task: SharedPickle
    worker: int
    memory: SharedMemory
    connection: Connection


def work(assignment: Assignment) -> None:
    """Compute gradients until told to end."""
    _serve(assignment, lambda task: _Worker(assignment, task))


def evaluate(assignment: Assignment) -> None:
    """Evaluate versions until told to end."""
    _serve(assignment, lambda task: _Evaluator(assignment, task))


def _serve(assignment: Assignment, build: Callable[[WorkerSpec], _Worker | _Evaluator]) -> None:
    init_child()
    connection = assignment.connection
    with ExitStack() as built:
        try:
            task: WorkerSpec = assignment.task.open()
            task.surroundings.apply()
            torch.set_num_threads(task.cluster.worker_threads)
            server = built.enter_context(closing(build(task)))
            connection.send(WorkerReady())
            while (request := connection.recv()) is not None:
                if not isinstance(request, WakeUp):  # one that came too late to interrupt anything
                    connection.send(server.answer(request))
        except (EOFError, ConnectionError):
            return  # the engine is gone
        except Exception as error:
            failure = failure_of(error)
            connection.send(TaskFailed(failure["failed"], failure["details"], failure["is_usage"]))


class _Worker:
    def __init__(self, assignment: Assignment, task: WorkerSpec) -> None:
        job, cluster, seed = task.job, task.cluster, task.seed
        self._worker = assignment.worker
        self._memory = assignment.memory
        self._connection = assignment.connection
        self._draw = 0
        device = device_of(cluster.device, self._worker)
        self._replica = Replica(job, seed, cluster.n, device=device, check=self._check, debug=cluster.debug)
        self._gradient = self._memory.gradient(self._replica.layout, self._worker)
        self._versions: dict[int, FlatBuffers] = {}
        faults = tuple(cluster.faults)
        self._task_runner = TaskRunner(self._replica, self._worker, cluster.slowness, seed, faults, self._sleep)
        if cluster.device == "cuda":
            pin(self._gradient)

    def answer(self, request: ComputeTask | EvaluateTask) -> TaskDone | TaskCancelled:
        assert isinstance(request, ComputeTask)
        begun_s = time.monotonic()
        self._draw = request.draw
        version = self._versions.get(request.place)
        if version is None:
            version = self._memory.version(self._replica.layout, request.place)
            self._versions[request.place] = version
        try:
            measured = self._task_runner.gradient(
                request.draw, request.minibatch, request.run_s, version, self._gradient
            )
        except Interrupted:
            return TaskCancelled(request.draw)
        except Exception as error:
            note_place(error, f"after update {request.version}")
            raise
        return TaskDone(request.draw, measured, begun_s - request.sent_s, time.monotonic())

    def close(self) -> None:
        """End what the replica has started: this process ends only after its children."""
        self._replica.close()

    def _check(self) -> None:
        if self._memory.is_interrupted(self._worker, self._draw):
            raise Interrupted

    def _sleep(self, seconds: float) -> None:
        """Wait; a message can only be the nudge of an interrupt, or the end."""
        if self._connection.poll(seconds):
            raise Interrupted


class _Evaluator:
    def __init__(self, assignment: Assignment, task: WorkerSpec) -> None:
        cluster = task.cluster
        self._memory = assignment.memory
        device = device_of(cluster.device, cluster.n)
        self._replica = Replica(task.job, task.seed, cluster.n, device=device)

    def answer(self, request: ComputeTask | EvaluateTask) -> EvaluationDone:
        assert isinstance(request, EvaluateTask)
        version = self._memory.version(self._replica.layout, request.place)
        return EvaluationDone(request.version, self._replica.evaluate(version))

    def close(self) -> None:
        """Nothing was started."""
