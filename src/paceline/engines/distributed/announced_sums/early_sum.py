"""Sum of gradients that begins while they are computed, as that of DistributedDataParallel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.engines.distributed.allreduce.elastic_group import CHUNK_BYTES, ElasticGroup
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.process_group import PendingCollective
from paceline.errors import RunError
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout, is_a_mean
from paceline.tensors.kernels import await_kernels
from paceline.tensors.squared_norms import scale_with_squared_norm, squared_norm


class VectorRange(NamedTuple):
    """Range of a flat vector whose sum begins when all its gradients are complete.

    Attributes:
        vector: number of the flat vector.
        start: first element.
        stop: element after the last one.
        parameters: indices of the parameters in it.
    """

    vector: int
    start: int
    stop: int
    parameters: frozenset[int]


class _Taken(NamedTuple):
    gradient: Tensor
    squared_norm: Tensor


class EarlySum:
    """Mean of the gradients of all ranks of a group, bucket by bucket.

    The sums of the buckets begin in the same order on all ranks, from the last parameter to the first: a bucket that is
    complete waits for those before it. A rank takes part in all of them, whatever becomes of its gradient. The
    coordinator says whether the mean is used; else the gradients are summed again.

    A gradient that a user's loop has computed is read where it is. It is copied to the memory of this rank's gradients
    only if the mean is not used.

    Args:
        layout: layout of the model.
        gradient: memory of this rank's gradients.
    """

    def __init__(self, layout: FlatLayout, gradient: FlatBuffers) -> None:
        self._total: FlatBuffers | None = None
        self._layout = layout
        self._gradient = gradient
        self._buckets = make_buckets(layout.parameter_ranges(), gradient)
        self._bucket_of = {each: i for i, bucket in enumerate(self._buckets) for each in bucket.parameters}
        self._group: ElasticGroup | None = None
        self._pending: list[PendingCollective] = []
        self._is_open = False  # between the beginning and the end of a gradient
        self._is_used = True  # whether nothing writes to the memory of the mean any more
        self._next = 0
        self._accumulated: set[int] = set()
        self._taken: dict[int, _Taken] = {}  # by number of the parameter: not in the memory of the gradients
        self._is_valid = True

    @property
    def total(self) -> FlatBuffers:
        """Memory of the mean."""
        self._total = self._total or self._layout.allocate(self._gradient.memory.device)
        return self._total

    def begin(self, group: ElasticGroup | None) -> None:
        """Begin the sum of the next gradient in a group, None for no early sum."""
        if not self._is_used:
            self.renew()  # the sums of the gradient before may still write to it
        self._group = group
        self._is_open = group is not None
        self._pending = []
        self._is_used = group is None
        self._next = 0
        self._accumulated = set()
        self._taken = {}
        self._is_valid = group is not None

    def renew(self) -> None:
        """Take other memory when the next sum begins."""
        self._total = None

    def on_accumulated(self, parameter: int) -> None:
        """Note that the gradient of a parameter is in memory, and begin the sums of the buckets that are complete."""
        if not self._is_open:
            return
        self._taken.pop(parameter, None)
        self._is_valid &= not (parameter in self._accumulated and self._has_begun(parameter))
        self._note(parameter)

    def take(self, parameter: int, gradient: Tensor) -> Tensor | None:
        """Read the gradient of a parameter, and begin the sums of the buckets that are complete.

        Args:
            parameter: number of the parameter, >= 0.
            gradient: its gradient, which stays as it is until the mean is complete.

        Returns:
            Squared norm of the gradient; None if it is not taken, and belongs in the memory of the gradients.
        """
        if not self._is_open or self._has_begun(parameter):
            return None
        assert self._group is not None
        total = self.total.parameters[parameter]
        if (gradient.dtype, gradient.device) != (total.dtype, total.device):
            return None
        norm = scale_with_squared_norm(gradient, 1 / self._group.size, total)
        self._taken[parameter] = _Taken(gradient, norm)
        self._note(parameter)
        return norm

    def complete_gradient(self) -> None:
        """Copy the gradients that were taken to the memory of the gradients.

        Raises:
            RunError: one has been changed since.
        """
        for parameter, (gradient, norm) in self._taken.items():
            if not torch.equal(squared_norm(gradient), norm):
                raise RunError(
                    "a gradient was changed in place after optimizer.step(), while the ranks summed it: change it "
                    "before the step, or a copy of it"
                )
            self._gradient.parameters[parameter].copy_(gradient)
        if self._taken:
            await_kernels(self._gradient.memory.device)  # another stream may use the memory of those again
        self._taken = {}

    def end(self) -> bool:
        """Begin the sums of all other buckets; return whether this rank's part is the gradient as it is now."""
        if not self._is_open:
            return False
        self._is_open = False
        assert self._group is not None
        while self._next < len(self._buckets):
            self._begin_next()
        for own, total in zip(self._gradient.flat_buffers, self.total.flat_buffers, strict=True):
            if is_a_mean(own):
                torch.mul(own, 1 / self._group.size, out=total)
            elif self._group.rank == 0:  # that of the lowest worker counts
                total.copy_(own)
            else:
                total.zero_()
            self._begin(total)
        return self._is_valid

    def wait(self) -> None:
        """Wait until the mean is complete.

        Raises:
            ConnectionLost: a member has left.
        """
        assert self._group is not None
        self._group.wait(self._pending)
        self._pending = []  # they hold the memory
        self._is_used = True
        self._taken = {}

    def _has_begun(self, parameter: int) -> bool:
        return self._bucket_of[parameter] < self._next

    def _note(self, parameter: int) -> None:
        self._accumulated.add(parameter)
        while self._next < len(self._buckets) and self._buckets[self._next].parameters <= self._accumulated:
            self._begin_next()

    def _begin_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        assert self._group is not None
        own, total = (
            flat.flat_parameters[bucket.vector][bucket.start : bucket.stop] for flat in (self._gradient, self.total)
        )
        in_memory = bucket.parameters - self._taken.keys()
        if in_memory == bucket.parameters:
            torch.mul(own, 1 / self._group.size, out=total)
        else:
            for each in in_memory:
                torch.mul(self._gradient.parameters[each], 1 / self._group.size, out=self.total.parameters[each])
        self._begin(total)

    def _begin(self, vector: Tensor) -> None:
        assert self._group is not None
        try:
            self._pending += self._group.begin_early(vector)
        except ConnectionLost:
            self._is_valid = False  # the coordinator learns it from the ranks that wait


def make_buckets(ranges: list[tuple[int, slice]], flat: FlatBuffers, nbytes: int = CHUNK_BYTES) -> list[VectorRange]:
    """Return the buckets of the parameters of a model, in the order in which a backward pass completes them.

    Args:
        ranges: number of the flat vector of each parameter, and its range there.
        flat: flat buffers of the model.
        nbytes: approximate bytes of a bucket.
    """
    buckets: list[VectorRange] = []
    for index, (vector, where) in reversed(list(enumerate(ranges))):
        itemsize = flat.flat_parameters[vector].itemsize
        last = buckets[-1] if buckets else None
        if last is not None and last.vector == vector and (last.stop - last.start) * itemsize < nbytes:
            buckets[-1] = VectorRange(vector, where.start, last.stop, last.parameters | {index})
        else:
            buckets.append(VectorRange(vector, where.start, where.stop, frozenset({index})))
    return buckets
