"""Process group of the processes on one host that form one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.core.events import Minibatch
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.process_group import AbortableGroup
from paceline.engines.distributed.transport.transport import Transport
from paceline.errors import RunError
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.worker.gradient_source import GradientGroup, Interrupted, PartialGradient

LOOPBACK = "127.0.0.1"


class NodeGroupLost(RunError):  # noqa: N818  # like ConnectionLost
    """A process of the node has left the group; the others cannot continue without it."""


class NodeGroup(GradientGroup):
    """Process group of a node, in which all processes call the same methods in the same order.

    With gradients g_1 ... g_m of the processes' shares, of s_1 ... s_m samples or of these weights, the gradient of the
    whole minibatch is sum(s_j g_j) / sum(s_j). If a loop has skipped its step in one process, all have. Floating-point
    buffers are averaged likewise; other buffers are those of the leader. A parameter has a gradient if it has one in
    any process.

    Args:
        local_rank: rank of this process in the group; 0 for the leader.
        size: number of processes.
        is_cancelled: returns whether the task of this process was cancelled.
        on_begin: called when this process begins a gradient, as of `begin`; None for no call.
        uses_nccl: whether each process has a GPU of its own, so that NCCL sums the gradients; else gloo does.
    """

    def __init__(
        self,
        local_rank: int,
        size: int,
        is_cancelled: Callable[[], bool],
        on_begin: Callable[[int, Minibatch | None, FlatBuffers], None] | None = None,
        *,
        uses_nccl: bool = False,
    ) -> None:
        self.local_rank = local_rank
        self.size = size
        self._is_cancelled = is_cancelled
        self._on_begin = on_begin
        self._uses_nccl = uses_nccl
        self._group = AbortableGroup(local_rank, size)

    def connect(self, transport: Transport, store: GroupStore, key: str) -> None:
        """Connect all processes of the node.

        Args:
            transport: transport of this process.
            store: store of the group.
            key: secret of the group.

        Raises:
            NodeGroupLost: a process did not connect.
        """
        with self._raising_group_lost():
            self._group.connect(transport, store, LOOPBACK, key)
            if self._uses_nccl:
                self._group.connect_gpus()

    def begin(self, draw: int, minibatch: Minibatch | None, version: FlatBuffers) -> None:
        """Let the leader forward the gradient that it begins at a version to the other processes."""
        if self._on_begin is not None:
            self._on_begin(draw, minibatch, version)

    def check(self) -> None:
        """Cancel the task in all processes if it was cancelled in one.

        Raises:
            Interrupted: the task was cancelled; all processes raise this at the same microbatch.
            NodeGroupLost: a process is gone.
        """
        self._sum_scalars()

    def broadcast(self, version: FlatBuffers) -> None:
        """Copy the leader's version to all processes."""
        with self._raising_group_lost():
            memory = version.memory.cpu()  # the leader's is on its GPU during local steps; a copy does for the sender
            self._group.wait([self._group.broadcast(memory)])

    def all_reduce(self, gradient: FlatBuffers, part: PartialGradient) -> PartialGradient:
        """Replace the gradient of this process by that of the whole minibatch, and return its scalars.

        Learning rates and options are those of this process.
        """
        ours = part.samples if part.weight is None else part.weight
        is_written = [i in gradient.written for i in range(len(gradient.parameters))]
        weight, samples, loss, mean_square, microbatches, skipped, overflowed, *written = self._sum_scalars(
            [
                ours,
                part.samples,
                ours * part.loss,
                ours * part.mean_square,
                part.microbatches,
                part.skipped,
                part.overflowed,
                *is_written,
            ]
        )
        with self._raising_group_lost():
            for flat in [*gradient.flat_parameters, *gradient.flat_buffers]:
                if flat.is_floating_point() or flat.is_complex():
                    _ = flat.mul_(ours / weight) if ours else flat.zero_()
                    self._sum(flat)
        gradient.written = {i for i, processes in enumerate(written) if processes}
        return part._replace(
            loss=loss / weight,
            samples=int(samples),
            mean_square=mean_square / weight,
            microbatches=int(microbatches),
            squared_norms={},
            skipped=skipped > 0,
            overflowed=overflowed > 0,
            weight=None if part.weight is None else weight,
        )

    def whole_norm(self, norm: float) -> float:
        """Return the squared norm of the gradient: each process has all of it."""
        return norm

    def abort(self) -> None:
        """End all waiting in the group, here and at the other processes. Thread-safe."""
        self._group.abort()

    def close(self) -> None:
        """Destroy the group; the other processes have finished or are gone."""
        self._group.close()

    def _sum_scalars(self, ours: Sequence[float] = ()) -> list[float]:
        """Return the sums of the numbers of all processes, unless the task was cancelled in one."""
        sums = torch.tensor([self._is_cancelled(), *ours], dtype=torch.float64)
        with self._raising_group_lost():
            self._sum(sums)
        is_cancelled, *rest = sums.tolist()
        if is_cancelled:
            raise Interrupted
        return rest

    def _sum(self, tensor: Tensor) -> None:
        """Replace the tensors of all processes by their sum; wait as long as the slowest one takes."""
        self._group.wait([self._group.all_reduce(tensor)])

    @contextmanager
    def _raising_group_lost(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionLost, RuntimeError) as error:  # gloo raises a RuntimeError
            raise NodeGroupLost(f"a process of this worker is gone: {error}".partition("\n")[0]) from error
