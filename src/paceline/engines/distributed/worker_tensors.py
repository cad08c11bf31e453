"""Tensors of a worker: how versions reach it, and what becomes of its gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.core.events import Measured
from paceline.engines.distributed.rendezvous.session import ClientSession
from paceline.engines.distributed.transport.announced_messages import RecomputeGradient
from paceline.engines.distributed.transport.messages import End, Message
from paceline.engines.distributed.transport.task_messages import RemoteEvaluateTask, RemoteTask, RemoteTaskDone
from paceline.tensors.flat_buffers import FlatBuffers


class Recomputation(NamedTuple):
    """Gradient of a lost worker that counts, so that another worker computes it.

    Attributes:
        lost: worker, task and minibatch.
        gradient: memory for the gradient.
        finish: called with whether the gradient is there; its computation was cancelled else.
    """

    lost: RecomputeGradient
    gradient: FlatBuffers
    finish: Callable[[bool], None]


Task = RemoteTask | RemoteEvaluateTask | Recomputation | End  # with the last version of a rank that has a shard
Start = Callable[[Task, FlatBuffers, float], None]


class WorkerTensors(ABC):
    """Versions and gradients of one worker process.

    Attributes:
        gradient: memory for its gradient.
        left_out: what compressed gradients have left out so far; empty without compression.
        sends_early: whether parts of a gradient leave before it is complete.
    """

    gradient: FlatBuffers
    left_out: Sequence[FlatBuffers] = ()
    sends_early = False

    @abstractmethod
    def use(self, sessions: Sequence[ClientSession], start: Start, fail: Callable[[Exception], None]) -> None:
        """Use connections from now on.

        Args:
            sessions: connections to the server of each shard, of which the first one is rank 0.
            start: called with a task and the version that it reads, when that is here, and the moment from which the
                worker is busy with it, on the monotonic clock.
            fail: called with an error in another thread.
        """

    @abstractmethod
    def disconnect(self) -> int:
        """End the use of connections that are lost; return the version that this worker has without one, else -1."""

    @abstractmethod
    def on_message(self, message: Message) -> bool:
        """Take a message of rank 0, in the thread of the sockets; return whether it is about tensors or tasks."""

    @abstractmethod
    def begin(self, draw: int) -> None:
        """Begin a gradient."""

    @abstractmethod
    def on_accumulated(self, parameter: int, busy_s: float, gradient: Tensor | None = None) -> Tensor | None:
        """Note that the gradient of a parameter is complete, by its number in the model.

        Args:
            parameter: number of the parameter, >= 0.
            busy_s: seconds since the task has arrived, >= 0.
            gradient: the gradient, if it is not in the memory for gradients.

        Returns:
            Squared norm of a gradient that is taken without a copy to that memory; else None.
        """

    @abstractmethod
    def end(self, measured: Measured, done: Callable[[Measured], RemoteTaskDone], *, is_needed: bool) -> None:
        """Tell that a gradient is complete.

        Args:
            measured: scalars of the gradient.
            done: returns the message with the scalars, which may have changed.
            is_needed: whether the gradient may still be used.
        """

    @abstractmethod
    def cancel(self, draw: int) -> None:
        """Tell that the rest of a gradient will not come."""

    @abstractmethod
    def check(self, checksum: int | None, who: str, at: str) -> None:
        """Check that the version is as rank 0 has it, if rank 0 has sent its checksum.

        Args:
            checksum: checksum of the version at rank 0; None to check nothing.
            who: name of the worker in the error.
            at: moment in the error.
        """

    @abstractmethod
    def close(self, *, has_failed: bool) -> None:
        """Release what was started."""
