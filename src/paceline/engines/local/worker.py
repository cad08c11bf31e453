"""A worker process, and the process that evaluates."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait

import torch

from paceline.cluster import LocalCluster
from paceline.engines.labour import Labour, device_of, pin
from paceline.engines.local.memory import SharedMemory
from paceline.engines.local.messages import (
    Abandoned,
    Evaluation,
    Failed,
    Finished,
    Measurement,
    Nudge,
    Ready,
    Work,
)
from paceline.engines.local.parcel import Parcel
from paceline.engines.replica import Interrupted, Replica
from paceline.errors import UsageError
from paceline.vectors import Vectors


@dataclass(frozen=True)
class Assignment:
    """What a process has to know.

    Attributes:
        job: packed.
        worker: its number; the process that evaluates has none of the workers'.
        connection: to the engine.
    """

    job: Parcel
    cluster: LocalCluster
    seed: int
    worker: int
    memory: SharedMemory
    connection: Connection


def work(assignment: Assignment) -> None:
    """Compute gradients until told to end."""
    _serve(assignment, lambda: _Worker(assignment).answer)


def evaluate(assignment: Assignment) -> None:
    """Evaluate versions until told to end."""
    _serve(assignment, lambda: _Evaluator(assignment).answer)


def _serve(
    assignment: Assignment,
    build: Callable[[], Callable[[Work | Evaluation], Finished | Abandoned | Measurement]],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the engine ends them
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(assignment.cluster.worker_threads)
    connection = assignment.connection
    try:
        answer = build()
        connection.send(Ready())
        while (request := connection.recv()) is not None:
            if not isinstance(request, Nudge):  # one that came too late to interrupt anything
                connection.send(answer(request))
    except (EOFError, ConnectionError):
        return  # the engine is gone
    except Exception as error:
        details = traceback.format_exc()
        message = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        connection.send(Failed(message, details, isinstance(error, UsageError)))


def end_with_parent() -> None:
    """Wait for the end of the process that started this one, and end too."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _Worker:
    def __init__(self, assignment: Assignment) -> None:
        job, cluster, seed = assignment.job.open(), assignment.cluster, assignment.seed
        self._worker = assignment.worker
        self._memory = assignment.memory
        self._connection = assignment.connection
        self._draw = 0
        device = device_of(cluster.device, self._worker)
        self._replica = Replica(job, seed, cluster.n, device=device, check=self._check, debug=cluster.debug)
        self._gradient = self._memory.gradient(self._replica.layout, self._worker)
        self._versions: dict[int, Vectors] = {}
        faults = tuple(cluster.faults)
        self._labour = Labour(self._replica, self._worker, cluster.slowness, seed, faults, self._sleep)
        if cluster.device == "cuda":
            pin(self._gradient)

    def answer(self, request: Work | Evaluation) -> Finished | Abandoned:
        assert isinstance(request, Work)
        begun_s = time.monotonic()
        self._draw = request.draw
        version = self._versions.get(request.place)
        if version is None:
            version = self._memory.version(self._replica.layout, request.place)
            self._versions[request.place] = version
        try:
            measured = self._labour.gradient(request.draw, request.minibatch, request.run_s, version, self._gradient)
        except Interrupted:
            return Abandoned(request.draw)
        return Finished(request.draw, measured, begun_s - request.sent_s, time.monotonic())

    def _check(self) -> None:
        if self._memory.is_interrupted(self._worker, self._draw):
            raise Interrupted

    def _sleep(self, seconds: float) -> None:
        """Wait; a message can only be the nudge of an interrupt, or the end."""
        if self._connection.poll(seconds):
            raise Interrupted


class _Evaluator:
    def __init__(self, assignment: Assignment) -> None:
        cluster = assignment.cluster
        self._memory = assignment.memory
        device = device_of(cluster.device, cluster.n)
        self._replica = Replica(assignment.job.open(), assignment.seed, cluster.n, device=device)

    def answer(self, request: Work | Evaluation) -> Measurement:
        assert isinstance(request, Evaluation)
        version = self._memory.version(self._replica.layout, request.place)
        return Measurement(request.version, self._replica.evaluate(version))
