"""What a worker does with a piece of work, wherever it runs: be as slow as asked for, fail by script, compute."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import torch

from paceline.clusters.faults import Fault
from paceline.clusters.simulated import Cluster
from paceline.core.events import Minibatch
from paceline.server.flat_buffers import FlatBuffers
from paceline.worker.replica import GradientStats, Replica
from paceline.worker.torch_utils import usable_device


class TaskRunner:
    """A worker's replica with its injected slowness and its scripted faults.

    Args:
        replica: computes the gradients.
        worker: its number.
        slowness: round trips of which the compute time is slept, if any.
        faults: of every worker.
        sleep: waits for so many seconds; it raises `Interrupted` when the work is to be abandoned.
    """

    def __init__(
        self,
        replica: Replica,
        worker: int,
        slowness: Cluster | None,
        seed: int,
        faults: tuple[Fault, ...],
        sleep: Callable[[float], None],
    ) -> None:
        self._replica = replica
        self._worker = worker
        self._slowness = slowness.round_trips(seed) if slowness is not None else None
        self._faults = {fault.draw: fault.kind for fault in faults if fault.worker == worker}
        self._sleep = sleep

    def gradient(
        self, draw: int, minibatch: Minibatch | None, run_s: float, version: FlatBuffers, gradient: FlatBuffers
    ) -> GradientStats:
        """Compute a gradient as `Replica.gradient` does.

        Args:
            draw: which piece of the worker's work.
            minibatch: which samples.
            run_s: seconds since the run began, by which slowness may change.
            version: to compute at.
            gradient: to write into.

        Raises:
            Interrupted: the work is to be abandoned.
        """
        begun_s = time.monotonic()
        self._inject_fault(draw)
        if self._slowness is not None:
            self._sleep(self._slowness.times(self._worker, draw, run_s).compute_s)
        slept_s = time.monotonic() - begun_s
        measured = self._replica.gradient(self._worker, draw, minibatch, version, gradient)
        finite = measured.finite and self._faults.get(draw) != "not_finite"
        return measured._replace(compute_s=measured.compute_s + slept_s, finite=finite)

    def _inject_fault(self, draw: int) -> None:
        match self._faults.get(draw):
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise RuntimeError(f"scripted fault at draw {draw}")
            case "hang":
                threading.Event().wait()


def device_of(kind: str, number: int) -> str:
    """Return the device of the worker of that number on its machine.

    Raises:
        UsageError: there is none.
    """
    if kind == "cpu":
        return "cpu"
    usable_device(kind)
    return f"cuda:{number % torch.cuda.device_count()}"


def pin(vectors: FlatBuffers) -> None:
    """Lock the pages of vectors, so that the GPU reads and writes them directly."""
    memory = vectors.memory
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
