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
from paceline.engines.replica import Interrupted, Replica, usable_device
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
        self._replica = Replica(job, seed, cluster.n, device=_device(cluster, self._worker), check=self._check)
        self._gradient = self._memory.gradient(self._replica.layout, self._worker)
        self._versions: dict[int, Vectors] = {}
        self._slowness = cluster.slowness.round_trips(seed) if cluster.slowness is not None else None
        self._faults = {fault.draw: fault.kind for fault in cluster.faults if fault.worker == self._worker}
        if cluster.device == "cuda":
            _pin(self._gradient)

    def answer(self, request: Work | Evaluation) -> Finished | Abandoned:
        assert isinstance(request, Work)
        begun = time.monotonic()
        self._draw = request.draw
        version = self._versions.get(request.place)
        if version is None:
            version = self._memory.version(self._replica.layout, request.place)
            self._versions[request.place] = version
        self._befall(request.draw)
        try:
            self._sleep(request)
            slept_s = time.monotonic() - begun
            measured = self._replica.gradient(self._worker, request.draw, request.minibatch, version, self._gradient)
        except Interrupted:
            return Abandoned(request.draw)
        finite = measured.finite and self._faults.get(request.draw) != "not_finite"
        measured = measured._replace(compute_s=measured.compute_s + slept_s, finite=finite)
        return Finished(request.draw, measured, begun - request.sent_s, time.monotonic())

    def _check(self) -> None:
        if self._memory.is_interrupted(self._worker, self._draw):
            raise Interrupted

    def _sleep(self, request: Work) -> None:
        """Be as slow as asked for; a message can only be the nudge of an interrupt, or the end."""
        if self._slowness is None:
            return
        seconds = self._slowness.times(self._worker, request.draw, request.run_s).compute_s
        if self._connection.poll(seconds):
            raise Interrupted

    def _befall(self, draw: int) -> None:
        match self._faults.get(draw):
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise RuntimeError(f"scripted fault at draw {draw}")
            case "hang":
                threading.Event().wait()


class _Evaluator:
    def __init__(self, assignment: Assignment) -> None:
        cluster = assignment.cluster
        self._memory = assignment.memory
        self._replica = Replica(assignment.job.open(), assignment.seed, cluster.n, device=_device(cluster, cluster.n))

    def answer(self, request: Work | Evaluation) -> Measurement:
        assert isinstance(request, Evaluation)
        version = self._memory.version(self._replica.layout, request.place)
        return Measurement(request.version, self._replica.evaluate(version))


def _device(cluster: LocalCluster, worker: int) -> str:
    if cluster.device == "cpu":
        return "cpu"
    usable_device(cluster.device)
    return f"cuda:{worker % torch.cuda.device_count()}"


def _pin(vectors: Vectors) -> None:
    """Lock the pages of a gradient, so that the GPU writes into them directly."""
    memory = vectors.memory
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
