"""Data loading: from the number of a minibatch to its samples, the same in every process and under every timing."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import lru_cache
from itertools import count, islice
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from paceline.core.events import Minibatch
from paceline.errors import RunError
from paceline.jobs.job import Batch, Job
from paceline.utils.rng import derived_seed, stream
from paceline.worker.seeding import seeded

WHOLE = Minibatch(0, None, None)
SAMPLERS_OF_TORCH = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


class MinibatchLoader:
    """Loader of the batch of each draw.

    Args:
        job: job with the data and their sampling.
        seed: seed of the run, >= 0.
        n: workers of the run, >= 1.
    """

    def __init__(self, job: Job, seed: int, n: int) -> None:
        self._job = job
        self._seed = seed
        self._n = n
        self._shards = shards = n if job.sharding == "partitioned" else 1
        self._streams: dict[int, _Stream] = {}
        self._order = lru_cache(maxsize=2 * shards)(self._epoch_order)
        self._shard = lru_cache(maxsize=shards)(self._samples_of_shard)

    def batch(self, worker: int, draw: int, minibatch: Minibatch | None) -> Batch:
        """Return the batch of a worker's draw; a numbered minibatch is the same for every worker."""
        if self._job.is_iterable:
            reader = self._streams.get(worker)
            if reader is None or reader.position >= draw:
                reader = self._streams[worker] = _Stream(self._job, worker, self._n, self._seed)
            return reader.batch(draw)
        return fetch(self._job, self.indices(worker, draw, minibatch))

    def share(self, worker: int, draw: int, minibatch: Minibatch | None, rank: int, size: int) -> Batch | None:
        """Return the share of one of several processes in a batch of map-style data, None for an empty share.

        Args:
            worker: number of the worker, >= 0.
            draw: number of the worker's draw, >= 1.
            minibatch: minibatch of the draw, as in `batch`.
            rank: rank of the process, 0 <= rank < size.
            size: number of processes, >= 1.
        """
        chosen = share_of(self.indices(worker, draw, minibatch), rank, size)
        return fetch(self._job, chosen) if len(chosen) else None

    def indices(self, worker: int, draw: int, minibatch: Minibatch | None) -> NDArray[np.int64]:
        """Return the indices of the samples in the batch of a worker's draw, for map-style data."""
        minibatch = minibatch or WHOLE
        if minibatch.slices:
            return np.concatenate(
                [
                    self._whole(part.worker, part.draw, minibatch._replace(epoch=part.epoch, number=part.number))[
                        part.begin : part.end
                    ]
                    for part in minibatch.slices
                ]
            )
        return self._whole(worker, draw, minibatch)

    def _whole(self, worker: int, draw: int, minibatch: Minibatch) -> NDArray[np.int64]:
        size = self._job.batch_size
        if minibatch.epoch is not None and minibatch.number is not None:
            order = self._order(minibatch.shard, minibatch.epoch)
            return order[minibatch.number * size : (minibatch.number + 1) * size]
        shard = self._shard(minibatch.shard)
        return shard[stream(self._seed, "minibatch", worker, draw).integers(len(shard), size=size)]

    def _epoch_order(self, shard: int, epoch: int) -> NDArray[np.int64]:
        if self._job.sampler is None:
            return stream(self._seed, "epoch", shard, epoch).permutation(self._shard(shard))
        seed = derived_seed(self._seed, "sampler", epoch)
        if type(self._job.sampler) in SAMPLERS_OF_TORCH:
            return np.fromiter(drawn_apart(self._job.sampler, seed), dtype=np.int64)
        if hasattr(self._job.sampler, "set_epoch"):
            self._job.sampler.set_epoch(epoch)
        own = getattr(self._job.sampler, "generator", None)
        if isinstance(own, torch.Generator):  # else the order would depend on the epochs that this process has read
            own.manual_seed(seed)
        with seeded(seed):
            return np.fromiter(self._job.sampler, dtype=np.int64)

    def _samples_of_shard(self, shard: int) -> NDArray[np.int64]:
        samples = np.arange(len(self._job.data))  # type: ignore[arg-type]  # not iterable here
        if self._shards == 1:
            return samples
        per_shard = len(samples) // self._shards
        shuffled = stream(self._seed, "shards").permutation(samples)
        return shuffled[shard * per_shard : (shard + 1) * per_shard]


def drawn_apart(sampler: Sampler[int], seed: int) -> Sampler[int]:
    """Return a sampler with a generator of its own: other threads draw from the global one meanwhile."""
    apart = copy(sampler)
    if not isinstance(apart, SequentialSampler):
        apart.generator = torch.Generator().manual_seed(seed)  # type: ignore[attr-defined]
    return apart


def share_of(indices: NDArray[np.int64], rank: int, size: int) -> NDArray[np.int64]:
    """Return the share of a batch for one of several processes; shares differ by at most one sample."""
    return np.array_split(indices, size)[rank]


def fetch(job: Job, indices: NDArray[np.int64], data: Dataset[Any] | None = None) -> Batch:
    """Return the batch of these samples of map-style data, by default the job's training data."""
    data = job.dataset if data is None else data
    index = torch.from_numpy(np.ascontiguousarray(indices))
    if job.collate is None:
        if hasattr(data, "minibatch"):
            return data.minibatch(index)
        if type(data) is TensorDataset:  # a subclass may change its samples
            return [tensor[index] for tensor in data.tensors]
    chosen = index.tolist()
    samples = data.__getitems__(chosen) if hasattr(data, "__getitems__") else [data[i] for i in chosen]
    return (job.collate or default_collate)(samples)


def eval_batches(job: Job) -> Iterator[Batch]:
    """Yield the evaluation data once, in batches of `eval_batch_size`; the last batch may be smaller."""
    data, size = job.eval_dataset, job.eval_batch_size or job.batch_size
    assert data is not None
    if isinstance(data, IterableDataset):
        yield from _batched(job, iter(data), size)
        return
    samples = np.arange(len(data))  # type: ignore[arg-type]  # map-style
    for start in range(0, len(samples), size):
        yield fetch(job, samples[start : start + size], data)


def batch_len(batch: Batch) -> int:
    """Return the number of samples in a batch: the length of the first tensor found in it.

    >>> batch_len({"x": torch.zeros(3, 2), "y": torch.zeros(3)})
    3
    """
    for tensor in _tensors(batch):
        return len(tensor) if tensor.ndim else 1
    return len(batch) if hasattr(batch, "__len__") else 1


def part_of(batch: Batch, start: int, end: int) -> Batch:
    """Return a range of samples of a batch, sliced from the first dimension of each of its tensors."""
    return pytree.tree_map_only(Tensor, itemgetter(slice(start, end)), batch)


def _tensors(batch: Batch) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors(value)


class _Stream:
    """Reader of iterable data for one worker: draw d is its d-th batch.

    A skipped batch is read with the random numbers of its own draw, so later batches do not depend on which batches
    were used.
    """

    def __init__(self, job: Job, worker: int, n: int, seed: int) -> None:
        self.position = 0
        self._job = job
        self._worker = worker
        self._seed = seed
        self._samples = islice(_repeat(job, seed), worker % n, None, n)

    def batch(self, draw: int) -> Batch:
        while self.position < draw - 1:
            with seeded(derived_seed(self._seed, "gradient", self._worker, self.position + 1)):
                self._next()
        return self._next()

    def _next(self) -> Batch:
        self.position += 1
        return next(_batched(self._job, self._samples, self._job.batch_size))


def _repeat(job: Job, seed: int) -> Iterator[Any]:
    """Yield the samples of iterable data endlessly, in each epoch in the same order for all workers."""
    for epoch in count():
        with seeded(derived_seed(seed, "iterable", epoch)):
            samples = iter(job.data)
            first = next(samples, None)  # here, because a generator begins to run at its first sample
        if first is None:
            raise RunError(f"job {job.name}: the iterable data gave no sample; expected at least one batch")
        yield first
        yield from samples


def _batched(job: Job, samples: Iterator[Any], size: int) -> Iterator[Batch]:
    collate = job.collate or default_collate
    while held := list(islice(samples, size)):
        yield collate(held)
