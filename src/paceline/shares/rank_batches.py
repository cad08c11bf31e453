"""Batches of every rank with equal shares, from a batch sampler that knows its rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import tee
from numbers import Integral
from typing import Any
from zlib import crc32

from torch.utils.data import DistributedSampler

from paceline.errors import UsageError

Batch = list[Any]  # of indices
NAMES = (("num_replicas", "rank"), ("num_processes", "process_index"))  # of torch's samplers, and of Accelerate's


def is_dealt_by_rank(sampler: Any, ranks: int) -> bool:
    """Return whether the batches of the other ranks are known on each rank.

    Args:
        sampler: batch sampler, which knows its rank itself, or reads a sampler that does.
        ranks: number of ranks.
    """
    names = _names(_knowing(sampler))
    return names is not None and getattr(_knowing(sampler), names[0]) == ranks


def epoch_of(sampler: Any) -> int | None:
    """Return the epoch of a sampler, or of the one that it reads; None if it has none."""
    while sampler is not None:
        if "epoch" in getattr(sampler, "__dict__", {}):
            return int(sampler.epoch)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return None


def checksum_of(batches: Sequence[Batch]) -> int:
    """Return a number by which ranks see whether they divide the samples of one update: that of the samples' indices.

    The first and the last sample of each rank's batch count. Samples that are not told by numbers count as 0.

    Args:
        batches: batch of each rank with equal shares.
    """
    ends = [index for batch in batches if batch for index in (batch[0], batch[-1])]
    return crc32(repr([int(each) if isinstance(each, Integral) else 0 for each in ends]).encode())


def batches_of_ranks(sampler: Any, ranks: int) -> list[Iterator[Batch]]:
    """Return the batches of each rank, from copies of a batch sampler that believe to be on that rank.

    Args:
        sampler: batch sampler for which `is_dealt_by_rank` holds.
        ranks: number of ranks.

    Raises:
        UsageError: the sampler draws other samples at each pass, so the copies do not agree.
    """
    knowing = _knowing(sampler)
    if knowing is sampler and hasattr(sampler, "batch_sampler"):  # which deals the batches of another one
        same = [_Same(sampler.batch_sampler, each) for each in tee(sampler.batch_sampler, ranks)]
        return [iter(_with(_as_rank(sampler, rank), batch_sampler=same[rank])) for rank in range(ranks)]
    if knowing is sampler:
        _check_repeats(sampler)
        return [iter(_as_rank(sampler, rank)) for rank in range(ranks)]
    if type(knowing).__iter__ is DistributedSampler.__iter__:
        whole = _samples_of_all(knowing)
        return [iter(_with(sampler, sampler=whole[rank::ranks])) for rank in range(ranks)]
    _check_repeats(knowing)
    return [iter(_with(sampler, sampler=_as_rank(knowing, rank))) for rank in range(ranks)]


class _Same:
    """Batch sampler that yields what another one has drawn once for all ranks."""

    def __init__(self, sampler: Any, batches: Iterable[Batch]) -> None:
        self._sampler = sampler
        self._batches = batches

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Batch]:
        return map(list, self._batches)


def _knowing(sampler: Any) -> Any:
    """Return the sampler that knows its rank: the batch sampler, or else what it reads."""
    return sampler if _names(sampler) else getattr(sampler, "sampler", None)


def _names(sampler: Any) -> tuple[str, str] | None:
    own = getattr(sampler, "__dict__", {})
    return next((names for names in NAMES if all(name in own for name in names)), None)


def _with(sampler: Any, /, **attributes: Any) -> Any:
    each = copy(sampler)
    for name, value in attributes.items():
        setattr(each, name, value)
    return each


def _as_rank(sampler: Any, rank: int) -> Any:
    names = _names(sampler)
    assert names is not None
    return _with(sampler, **{names[1]: rank})


def _samples_of_all(sampler: DistributedSampler[Any]) -> list[Any]:
    """Return the samples of all ranks in order: each copy would draw the same permutation of the whole data set."""
    return list(_with(sampler, num_replicas=1, rank=0, num_samples=sampler.total_size))


def _check_repeats(sampler: Any) -> None:
    if list(copy(sampler)) != list(copy(sampler)):
        raise UsageError(
            f"{type(sampler).__name__} draws other samples at each pass, so a rank cannot know those of the others: "
            "draw them from a generator that is made anew with the seed and the epoch at each pass, as "
            "DistributedSampler does, or start the script with torchrun"
        )
