"""Gradient accumulation: running means in place, and the last part of a mean in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.tensors.blocks import block_like, in_blocks
from paceline.tensors.finite import are_finite
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout, copy_checked, is_a_mean
from paceline.tensors.mean_loops import move_mean, update_mean


class _Queued(NamedTuple):
    """A gradient in the queue, not yet part of the mean."""

    gradient: FlatBuffers
    weight: float
    scaled_weight: float  # times its step scale
    worker: int


class GradientAccumulator:
    """Weighted running mean of the gradients of the open update.

    Gradients g_1 ... g_k with weights w_1 ... w_k, as their samples, and step scales c_1 ... c_k have the mean
    sum(c_j w_j g_j) / sum(c_j w_j). Floating-point buffers move by the mean of their changes with the weights w_j.
    Whole numbers and booleans, as positions in a queue, take the values of the worker with the lowest number: under BSP
    those of worker 0, as with DistributedDataParallel.

    The running mean is made in the order of workers, so its bits do not depend on when gradients arrive. A gradient
    waits in the queue until no worker with a lower number can have one in the update any more (decision 0041).

    Args:
        layout: layout of the gradients.
        device: device of the mean; its memory is allocated at the first update of two or more gradients.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._queue: list[_Queued] = []
        self._count = 0
        self._weight: float = 0
        self._scaled_weight = 0.0
        self._not_finite: int | None = None  # worker of the first gradient of the update that is not finite
        self._worker: int | None = None  # whose whole numbers the mean has
        self._written: set[int] = set()  # parameters of which a gradient of the update has one

    @cached_property
    def mean(self) -> FlatBuffers:
        """Mean of the gradients accumulated so far."""
        return self._layout.allocate(self._device)

    def enqueue(self, gradient: FlatBuffers, weight: float, step_scale: float, worker: int = 0) -> None:
        """Queue one gradient for the open update."""
        scaled_weight = weight * step_scale
        self._queue.append(_Queued(gradient=gradient, weight=weight, scaled_weight=scaled_weight, worker=worker))
        self._count += 1
        self._written |= gradient.written

    @property
    def has_queued(self) -> bool:
        """Whether gradients are queued."""
        return bool(self._queue)

    def accumulate(self, below: float = inf) -> None:
        """Add queued gradients to the mean; a lone first one stays queued: adding it with the second saves a copy.

        Args:
            below: lowest number of a worker that may still have a gradient in the update; inf if none may.
        """
        if not self._weight and len(self._queue) < 2:  # as in most calls
            return
        ready = [queued for queued in self._queue if queued.worker < below]
        if self._weight or len(ready) > 1:
            self._queue = [queued for queued in self._queue if queued.worker >= below]
            self._add(ready)

    def flush(self, worker: int | None = None) -> None:
        """Add the whole queue to the mean; the queued gradients may be overwritten afterwards.

        Args:
            worker: worker without whose gradient in the queue nothing is added; None for none.
        """
        if worker is None or any(queued.worker == worker for queued in self._queue):
            ready, self._queue = self._queue, []
            self._add(ready)

    def _add(self, ready: Sequence[_Queued]) -> None:
        """Add gradients that were queued to the mean."""
        if not ready:
            return
        ready = _in_order(ready)
        weights = self._flush_buffers(ready)
        new = [queued.gradient for queued in ready]
        vectors = zip(*(each.flat_parameters for each in [self.mean, *new]), strict=True)
        checks = [move_mean(mean, gradients, weights) for mean, *gradients in vectors]
        if self._not_finite is None and not all(map(isfinite, checks)):
            self._not_finite = first_not_finite(ready)

    def finish(self) -> MeanGradient:
        """Return the mean of the update, and begin the next update.

        A single gradient is its own mean, without a copy. The queue is added when the mean is read.
        """
        last = self._queue if len(self._queue) < 2 else _in_order(self._queue)
        new = [queued.gradient for queued in last]
        if len(new) == 1 and not self._weight:
            mean = MeanGradient(new, [1.0], new[0], self._count, is_borrowed=True)
        elif self._weight:
            mean = MeanGradient([self.mean, *new], [1.0, *self._flush_buffers(last)], self.mean, self._count)
        else:
            mean = MeanGradient(new, self._flush_buffers(last), self.mean, self._count)
        mean.not_finite = self._not_finite
        mean.last = last
        if not mean.is_borrowed:
            self.mean.written = self._written
        self.clear()
        return mean

    def clear(self) -> None:
        """Drop the gradients of the open update, and begin the next update."""
        self._queue = []
        self._count = 0
        self._weight = 0
        self._scaled_weight = 0.0
        self._worker = None
        self._not_finite = None
        self._written = set()

    def _flush_buffers(self, ready: Sequence[_Queued]) -> list[float]:
        """Add the buffers of queued gradients to the mean; return the weights of these in the running mean."""
        if not ready:
            return []
        weights, shares, taken = [], [], None
        for queued in ready:
            self._weight += queued.weight
            self._scaled_weight += queued.scaled_weight
            # A running mean leaves no pass for a division (decision 0003).
            weights.append(queued.scaled_weight / self._scaled_weight)
            shares.append(queued.weight / self._weight)
            if self._worker is None or queued.worker <= self._worker:
                self._worker = queued.worker
                taken = queued.gradient
        new = [queued.gradient for queued in ready]
        vectors = zip(*(each.flat_buffers for each in [self.mean, *new]), strict=True)
        for i, (mean, *changes) in enumerate(vectors):
            if is_a_mean(mean):
                update_mean(mean, changes, shares)
            elif taken is not None:
                mean.copy_(taken.flat_buffers[i])
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Return the mean and its weights; the queue is flushed first."""
        self.flush()
        mean: dict[str, Sequence[Any]] | None = None
        if self._weight:
            written = [i in self._written for i in range(len(self.mean.parameters))]
            mean = {"parameters": self.mean.parameters, "buffers": self.mean.buffers, "written": written}
        return {"samples": self._weight, "weight": self._scaled_weight, "mean": mean, "worker": self._worker}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state in place of this one; of a state of all shards, the tensors of this layout are taken."""
        self.clear()
        self._weight = state["samples"]
        self._scaled_weight = state["weight"]
        mean = state["mean"]
        self._worker = state.get("worker")
        if mean is not None:
            parameters, buffers = self._layout.parameters, self._layout.buffers
            saved = [
                *mean["parameters"][parameters.start : parameters.stop],
                *mean["buffers"][buffers.start : buffers.stop],
            ]
            written = mean["written"][parameters.start : parameters.stop]
            self._written = {i for i, is_written in enumerate(written) if is_written}
            for view, tensor in zip([*self.mean.parameters, *self.mean.buffers], saved, strict=True):
                copy_checked(view, tensor)


class MeanGradient:
    """Mean gradient of an update, whose last part is computed when it is read: as a whole, or block by block.

    Args:
        vectors: vectors of the running mean, in order.
        weights: weight of each vector in the mean of the vectors up to it, in (0, 1]; that of the first is 1.
        storage: storage of the whole mean, whose buffers are complete; the first vector may be the same.
        count: number of gradients in the mean, >= 1.
        is_borrowed: whether the storage belongs to a worker.

    Attributes:
        not_finite: worker of the first gradient that is not finite among those that were added before; None if all of
            them are.
        last: gradients that were not added before.
    """

    not_finite: int | None = None
    last: Sequence[_Queued] = ()

    def __init__(
        self,
        vectors: Sequence[FlatBuffers],
        weights: Sequence[float],
        storage: FlatBuffers,
        count: int,
        *,
        is_borrowed: bool = False,
    ) -> None:
        self.count = count
        self.is_borrowed = is_borrowed
        self._vectors = vectors
        self._weights = weights
        self._storage = storage

    @property
    def written(self) -> set[int]:
        """Indices of the parameters of which at least one gradient of the update has one."""
        return self._storage.written

    @property
    def flat_buffers(self) -> list[Tensor]:
        """Flat vectors of the changes of the buffers."""
        return self._storage.flat_buffers

    @property
    def whole(self) -> FlatBuffers:
        """Mean in its storage, computed at the first access."""
        if len(self._vectors) > 1:
            for vectors in zip(*(each.flat_parameters for each in (self._storage, *self._vectors)), strict=True):
                for mean, *blocks in in_blocks(*vectors):
                    update_mean(mean, blocks, self._weights)
            self._vectors = [self._storage]
            self._weights = [1.0]
        return self._storage

    def worker_not_finite(self) -> int | None:
        """Return the worker of the first gradient that is not finite; None if all are."""
        return self.not_finite if self.not_finite is not None else first_not_finite(self.last)

    def part(self, number: int, elements: slice, factor: float) -> RunningMean:
        """Return a range of one flat vector, times a factor."""
        return RunningMean([each.flat_parameters[number][elements] for each in self._vectors], self._weights, factor)


class RunningMean(NamedTuple):
    """Running mean of vectors, times a factor, which is computed while it is read.

    Attributes:
        vectors: vectors of the mean, in order, each [n].
        weights: weight of each vector in the mean of the vectors up to it, in (0, 1]; that of the first is 1.
        factor: factor on the mean, > 0.
    """

    vectors: Sequence[Tensor]
    weights: Sequence[float]
    factor: float

    def blocks(self) -> Iterator[Tensor]:
        """Yield the blocks, each valid until the next one. They must not be changed: they may be a worker's."""
        if len(self.vectors) == 1 and self.factor == 1.0:
            yield from (block for (block,) in in_blocks(*self.vectors))
            return
        scratch = block_like(self.vectors[0])
        for blocks in in_blocks(*self.vectors):
            mean = scratch[: len(blocks[0])]
            update_mean(mean, blocks, self.weights)
            yield mean.mul_(self.factor) if self.factor != 1.0 else mean

    def of_vectors(self, most: int) -> RunningMean:
        """Return the same mean of at most this number of vectors, >= 1, if these have the length of a block."""
        first = len(self.vectors) - most + 1
        if first <= 1:
            return self
        mean = torch.empty_like(self.vectors[0])
        update_mean(mean, self.vectors[:first], self.weights[:first])
        return RunningMean([mean, *self.vectors[first:]], [1.0, *self.weights[first:]], self.factor)


def first_not_finite(queued: Sequence[_Queued]) -> int | None:
    """Return the worker of the first gradient that is not finite; None if all are."""
    return next((each.worker for each in queued if not are_finite(each.gradient.flat_parameters)), None)


def _in_order(queued: Sequence[_Queued]) -> list[_Queued]:
    """Return gradients in the order of workers, and those of one worker in the order of arrival."""
    return sorted(queued, key=lambda each: each.worker)
