"""The processes of one worker, on one host: what they agree on, and how they add up what each has computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.engines.distributed.transport.connection import ConnectionLost, dist
from paceline.engines.distributed.transport.process_group import AbortableGroup
from paceline.errors import RunError
from paceline.server.flat_buffers import FlatBuffers
from paceline.worker.replica import GradientGroup, Interrupted, PartialGradient


class NodeGroupLost(RunError):  # noqa: N818  # as a line is broken
    """A process of the team is gone, or does not take part any more; the others cannot go on without it."""


class NodeGroup(GradientGroup):
    """A process group of a host, in which everything is done by everybody, in the same order.

    With gradients g_1 ... g_m of the processes' shares, of s_1 ... s_m samples, that of the whole is
    sum(s_j g_j) / sum(s_j). Floating-point buffers move likewise; others as those of the first process do.

    Args:
        place: of this process, 0 for the one that the others follow.
        size: processes.
        is_unwanted: whether this process knows that the work is to be abandoned.
        uses_nccl: whether each process has a GPU of its own, so that NCCL adds up the gradients; else gloo.
    """

    def __init__(self, place: int, size: int, is_unwanted: Callable[[], bool], *, uses_nccl: bool = False) -> None:
        self.local_rank = place
        self.size = size
        self._is_unwanted = is_unwanted
        self._uses_nccl = uses_nccl
        self._collective = AbortableGroup(place, size)
        self._sums = torch.zeros(5, dtype=torch.float64)

    def connect(self, store: Any, key: str, device: Any) -> None:
        """Meet the others at a store, under a key that only they know.

        Args:
            store: a client of its own.
            key: of this team.
            device: of gloo, on this host.

        Raises:
            Torn: not all have come.
        """
        with self._tearing():
            self._collective.connect(dist.PrefixStore(key, store), device)
            if self._uses_nccl:
                self._collective.connect_gpus(dist.PrefixStore(f"{key}/nccl", store))

    def check(self) -> None:
        """Let all of them abandon the work if one of them knows that it is to be abandoned.

        Raises:
            Interrupted: it is, and every process hears so at the same microbatch.
            Torn: one of them is gone.
        """
        self._agree(0.0, 0.0, 0.0, 0.0)

    def hand_round(self, version: FlatBuffers) -> None:
        """Make the first process's version that of all."""
        with self._tearing():
            self._collective.wait([self._collective.broadcast(version.memory)])

    def all_reduce(self, gradient: FlatBuffers, part: PartialGradient) -> PartialGradient:
        """Make of the gradient of this process that of all of them, and return what was measured of the whole."""
        ours = part.samples
        samples, loss, mean_square, microbatches = self._agree(
            ours, ours * part.loss, ours * part.mean_square, part.microbatches
        )
        with self._tearing():
            for flat in [*gradient.flat_parameters, *gradient.flat_buffers]:
                if flat.is_floating_point() or flat.is_complex():
                    _ = flat.mul_(ours / samples) if ours else flat.zero_()
                    self._add_up(flat)
        gradient.written.update(range(len(gradient.parameters)))
        return PartialGradient(loss / samples, int(samples), mean_square / samples, int(microbatches))

    def abort(self) -> None:
        """Let whoever waits for the others hear that the team is torn, here and there; any thread may call it."""
        self._collective.break_off()

    def close(self) -> None:
        """Let go of the others, who are through or gone."""
        self._collective.let_go()

    def _agree(self, *ours: float) -> list[float]:
        """Return the sums of everybody's numbers, unless somebody knows better than to go on."""
        sums: Tensor = self._sums
        sums.copy_(torch.tensor([self._is_unwanted(), *ours], dtype=torch.float64))
        with self._tearing():
            self._add_up(sums)
        is_unwanted, *rest = sums.tolist()
        if is_unwanted:
            raise Interrupted
        return rest

    def _add_up(self, tensor: Tensor) -> None:
        """Make of everybody's tensor the sum of them, however long one of them takes."""
        self._collective.wait([self._collective.all_reduce(tensor)])

    @contextmanager
    def _tearing(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionLost, RuntimeError) as error:
            raise NodeGroupLost(f"a process of this worker is gone: {error}".partition("\n")[0]) from error
