"""Costs of the samples of a data set, where they are known before the samples are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import default_collate, default_convert

from paceline.errors import UsageError
from paceline.policies.dealing import deal_padded, deal_samples, of_few_counts
from paceline.shares.batches import Dealt
from paceline.shares.rank_batches import Batch

CostOf = Callable[[Any], float]  # of an index
NOT_PADDING = ("flatten", "pack")
UNKNOWN = "none"  # given where lengths of the data set are no costs
COLUMNS = ("length", "lengths")  # of data sets of Hugging Face


def cost_function(given: CostOf | str | None, dataset: Any) -> CostOf | None:
    """Return the cost of each sample by its index; None if it is not known, or the same for all.

    Args:
        given: function of the index; the path of a file of numpy with a cost for each sample; "none" for no costs; None
            to look for lengths in the data set.
        dataset: data set of the loader.

    Raises:
        UsageError: the file has not one positive cost for each sample; from the function that is returned, that the
            given one does not return one.
    """
    if callable(given):
        return partial(_checked, given)
    if given == UNKNOWN:
        return None
    lengths = _read(given, dataset) if given else _lengths(dataset)
    if lengths is None or len(lengths) == 0 or lengths.min() == lengths.max():
        return None
    return partial(_at, lengths)


def _checked(cost_of: CostOf, index: Any) -> float:
    cost = float(cost_of(index))
    if not 0 < cost < inf:
        raise UsageError(f"the cost of sample {index} is {cost:g}, expected a positive number")
    return cost


def _at(costs: Any, index: Any) -> float:
    return float(costs[index])


def _read(path: str, dataset: Any) -> Any:
    try:
        costs = np.load(Path(path), allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"--cost {path} cannot be read as an array of numpy ({error})") from error
    if costs.shape != (len(dataset),):
        raise UsageError(
            f"--cost {path} has the shape {costs.shape}, expected a cost for each of {len(dataset)} samples"
        )
    if not np.isfinite(costs).all() or costs.min() <= 0:
        raise UsageError(f"--cost {path} has costs that are not positive numbers")
    return costs.astype(float)


def _lengths(dataset: Any) -> Any:
    """Return the lengths of token sequences that a data set has at hand, at least 1; None without."""
    names = getattr(dataset, "column_names", None) or ()
    for name in COLUMNS:
        if name in names:
            return np.maximum(np.asarray(dataset[name], dtype=float), 1)
    if isinstance(dataset, Sequence) and len(dataset) and isinstance(dataset[0], dict) and "input_ids" in dataset[0]:
        return np.asarray([max(len(each["input_ids"]), 1) for each in dataset], dtype=float)
    return None


def pads(collate: Any) -> bool:
    """Return whether a collate function is taken to pad the samples of a batch to the longest one.

    That of torch cannot, and those that flatten or pack the samples into one sequence do not.
    """
    name = getattr(collate, "__name__", type(collate).__name__)
    return collate not in (default_collate, default_convert) and not any(each in name.lower() for each in NOT_PADDING)


def how_known(cost_of: CostOf | None, collate: Any) -> str:
    """Return how the samples of a loader are dealt by their costs, for a message; empty if they are not."""
    if cost_of is None:
        return ""
    return "samples of like length together" if pads(collate) else "samples by their cost"


def deal_by_cost(
    batches: Sequence[Batch],
    rank: int,
    cost_of: CostOf,
    seconds: Sequence[float],
    limits: Sequence[float],
    max_share: float,
    used: list[tuple[int, ...]] | None,
    *,
    is_padded: bool,
) -> tuple[Batch, Dealt]:
    """Return a rank's batch of an update, and how the update is divided, so that all ranks end together.

    Args:
        batches: batch of each rank with equal shares, all of one size.
        rank: number of the rank.
        cost_of: cost of a sample by its index, > 0.
        seconds: seconds of each rank per unit of cost.
        limits: cost of a batch for which each rank has memory; that of equal shares is taken to fit.
        max_share: largest work of a rank as a multiple of the largest one with equal shares, >= 1.
        used: earlier numbers of samples of the ranks, where a compiler takes few sizes; else None.
        is_padded: whether each sample of a batch costs as much as the longest one.
    """
    samples = [sample for batch in batches for sample in batch]
    costs = [float(cost_of(sample)) for sample in samples]
    size = len(batches[0])
    equal = [_work(costs[begin : begin + size], is_padded=is_padded) for begin in range(0, len(costs), size)]
    most = [min(max_share * max(equal), max(limit, max(equal))) for limit in limits]
    deal = deal_padded if is_padded else deal_samples
    if used is None:
        groups = deal(costs, seconds, most)
    else:
        groups = of_few_counts(
            deal=deal, costs=costs, seconds=seconds, most=most, used=used, work=partial(_work, is_padded=is_padded)
        )
    work = [_work([costs[each] for each in group], is_padded=is_padded) for group in groups]
    dealt = Dealt(samples=tuple(map(len, groups)), size=size, work=tuple(work), equal_work=tuple(equal))
    return [samples[each] for each in groups[rank]], dealt


def equal_by_cost(batches: Sequence[Batch], cost_of: CostOf, *, is_padded: bool) -> Dealt:
    """Return the division of an update whose batches stay, with their costs; the arguments are as above."""
    work = tuple(_work([float(cost_of(sample)) for sample in batch], is_padded=is_padded) for batch in batches)
    return Dealt(samples=tuple(map(len, batches)), size=len(batches[0]), work=work, equal_work=work)


def work_of(batches: Sequence[Batch], shares: Sequence[int], cost_of: CostOf, *, is_padded: bool) -> tuple[float, ...]:
    """Return the cost of each rank's share of an update, whose samples are dealt in the order of ranks."""
    costs = iter([float(cost_of(sample)) for batch in batches for sample in batch])
    return tuple(_work(list(islice(costs, share)), is_padded=is_padded) for share in shares)


def _work(costs: Sequence[float], *, is_padded: bool) -> float:
    return max(costs, default=0.0) * len(costs) if is_padded else sum(costs)
