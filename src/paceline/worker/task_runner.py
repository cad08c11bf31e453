"""Task runner of real workers: injected slowness, scripted faults, and the gradient."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from paceline.clusters.faults import Fault
from paceline.clusters.simulated import Cluster
from paceline.core.events import Measured, Minibatch
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.worker.local_steps import LocalStepsReplica
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import usable_device


def kill_process() -> None:
    """End this process at once, without any clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """Wait forever."""
    threading.Event().wait()


FAULT_ACTIONS = MappingProxyType({"die": kill_process, "hang": hang})


class TaskRunner:
    """Runner of a worker's tasks, with injected slowness and scripted faults.

    Args:
        replica: replica that computes the gradients.
        worker: number of the worker, >= 0.
        slowness: simulated cluster whose compute times are slept, None for no slowness.
        seed: seed of the run, >= 0.
        faults: scripted faults of all workers.
        sleep: function that waits for a number of seconds, and raises `Interrupted` if the task is cancelled.
        fault_actions: functions that carry out the faults "die" and "hang".
    """

    def __init__(
        self,
        replica: Replica,
        worker: int,
        slowness: Cluster | None,
        seed: int,
        faults: tuple[Fault, ...],
        sleep: Callable[[float], None],
        fault_actions: Mapping[str, Callable[[], None]] = FAULT_ACTIONS,
    ) -> None:
        self._replica = replica
        self._worker = worker
        self._slowness = slowness.round_trips(seed) if slowness is not None else None
        self._faults = {fault.draw: fault for fault in faults if fault.worker == worker}
        self._sleep = sleep
        self._fault_actions = fault_actions

    def gradient(
        self, draw: int, minibatch: Minibatch | None, run_s: float, version: FlatBuffers, gradient: FlatBuffers
    ) -> Measured:
        """Compute a gradient as `Replica.gradient` does.

        Args:
            draw: number of the worker's draw, >= 1.
            minibatch: minibatch of the draw, None if the worker samples it.
            run_s: seconds since the start of the run; slowness may depend on them.
            version: version at which to compute.
            gradient: flat buffers for the gradient.

        Raises:
            Interrupted: the task is cancelled.
        """
        start_s = time.monotonic()
        if isinstance(self._replica, LocalStepsReplica):

            def before_step(step: int, number: int) -> None:
                self._inject_fault(draw, step)
                self._slow_down(number, run_s + time.monotonic() - start_s)

            self._replica.before_step = before_step
        else:
            self._inject_fault(draw)
            self._slow_down(draw, run_s, 1.0 if minibatch is None else minibatch.share)
        slept_s = time.monotonic() - start_s
        measured = self._replica.gradient(self._worker, draw, minibatch, version, gradient)
        fault = self._faults.get(draw)
        finite = measured.finite and (fault is None or fault.kind != "not_finite")
        return measured._replace(compute_s=measured.compute_s + slept_s, finite=finite)

    def lost_gradient(
        self,
        worker: int,
        draw: int,
        minibatch: Minibatch | None,
        run_s: float,
        version: FlatBuffers,
        gradient: FlatBuffers,
    ) -> None:
        """Compute the gradient of a lost worker, at the speed of this one and without scripted faults.

        Args:
            worker: number of the lost worker, >= 0.
            draw: number of its draw, >= 1.
            minibatch: minibatch of the draw, None if the worker samples it.
            run_s: seconds since the start of the run.
            version: version at which to compute.
            gradient: flat buffers for the gradient.

        Raises:
            Interrupted: the task is cancelled.
        """
        self._slow_down(draw, run_s, 1.0 if minibatch is None else minibatch.share)
        self._replica.gradient(worker, draw, minibatch, version, gradient)

    def _slow_down(self, number: int, run_s: float, share: float = 1.0) -> None:
        """Sleep for the simulated time of a share of a minibatch."""
        if self._slowness is not None:
            self._sleep(self._slowness.times(self._worker, number, run_s, share).compute_s)

    def _inject_fault(self, draw: int, step: int = 1) -> None:
        fault = self._faults.get(draw)
        if fault is None or fault.step != step:
            return
        if fault.kind == "raise":
            raise RuntimeError(f"scripted fault at draw {draw}")
        if fault.kind in self._fault_actions:
            self._fault_actions[fault.kind]()


def device_of(kind: str, number: int) -> str:
    """Return the device of the worker with this number on its machine.

    Raises:
        UsageError: this machine has no such device.
    """
    if kind == "cpu":
        return "cpu"
    usable_device(kind)
    return f"cuda:{number % torch.cuda.device_count()}"


def gpu_of(device: torch.device | str) -> str:
    """Return an identifier of a GPU, equal in all processes that compute on it; an empty text for a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # from torch 2.5 on
    return f"{socket.gethostname()} {device.index}" if uuid is None else str(uuid)


def pin(flat: FlatBuffers) -> None:
    """Lock the pages of flat buffers, so that the GPU reads and writes them directly."""
    memory = flat.memory
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
