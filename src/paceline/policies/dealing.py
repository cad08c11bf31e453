"""Dealing of samples of unequal cost to ranks of unequal speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from paceline.policies.share_limits import are_few

Groups = list[list[int]]  # positions of the samples of each rank
HALVINGS = 30  # of the interval in which the time lies


Deal = Callable[..., Groups]  # `deal_samples` or `deal_padded`


def deal_samples(
    costs: Sequence[float],
    seconds: Sequence[float],
    most: Sequence[float] | None = None,
    counts: Sequence[int] | None = None,
) -> Groups:
    """Return the samples of each rank, where the cost of a batch is the sum of its samples.

    The longest sample first, each goes to the rank that would end first with it, and each rank gets one at least.

    Args:
        costs: cost of each sample, > 0; at least as many as there are ranks.
        seconds: seconds of each rank per unit of cost, > 0.
        most: largest cost of each rank's batch, if the samples can be dealt so; None for no limit.
        counts: number of samples of each rank, where it is given.

    Returns:
        Positions of the samples of each rank, those of large cost first.

    Example:
        >>> deal_samples([8, 7, 6, 5, 4, 4], seconds=[1, 1])
        [[0, 3, 4], [1, 2, 5]]

    Source: longest processing time first (Graham, 1969), on ranks of unequal speeds.
    """
    order = sorted(range(len(costs)), key=lambda each: (-costs[each], each))
    groups: Groups = [[] for _ in seconds]
    loads = [0.0] * len(seconds)
    for number, sample in enumerate(order):
        left = len(order) - number
        empty = [rank for rank, group in enumerate(groups) if not group]
        if counts is not None:
            allowed = [rank for rank, group in enumerate(groups) if len(group) < counts[rank]]
        else:
            allowed = empty if len(empty) == left else [*range(len(groups))]
        after = {rank: loads[rank] + costs[sample] for rank in allowed}
        is_over = {rank: most is not None and after[rank] > most[rank] for rank in allowed}
        rank = min(after, key=lambda each: (is_over[each], after[each] * seconds[each], each))
        groups[rank].append(sample)
        loads[rank] += costs[sample]
    return groups


def deal_padded(
    lengths: Sequence[float],
    seconds: Sequence[float],
    most: Sequence[float] | None = None,
    counts: Sequence[int] | None = None,
) -> Groups:
    """Return the samples of each rank, where all samples of a batch are padded to its longest one.

    A batch of k samples whose longest has length l costs l k. Samples are sorted by length and cut into one run for
    each rank, so that the last rank ends as early as possible; the long samples go to the fast ranks, or to the slow
    ones, whichever ends first.

    Args:
        lengths: length of each sample, > 0; at least as many as there are ranks.
        seconds: seconds of each rank per unit of cost, > 0.
        most: largest cost of each rank's batch, if the samples can be dealt so; None for no limit.
        counts: number of samples of each rank, where it is given.

    Returns:
        Positions of the samples of each rank, the longest first.

    Example:
        >>> deal_padded([8, 1, 1, 1, 7, 1, 1, 1], seconds=[1, 1])
        [[0, 4], [1, 2, 3, 5, 6, 7]]
    """
    order = sorted(range(len(lengths)), key=lambda each: (-lengths[each], each))
    sorted_lengths = [lengths[each] for each in order]
    ranks = sorted(range(len(seconds)), key=lambda rank: (seconds[rank], rank))
    limits = most or [inf] * len(seconds)
    best: tuple[float, list[int], list[int]] = (inf, [], [])
    for ordered in (ranks, ranks[::-1]):
        if counts is None:
            runs = _runs(sorted_lengths, [seconds[rank] for rank in ordered], [limits[rank] for rank in ordered])
        else:
            runs = [counts[rank] for rank in ordered]
        begins = [sum(runs[:number]) for number in range(len(runs))]
        end_s = max(sorted_lengths[b] * k * seconds[r] for b, k, r in zip(begins, runs, ordered, strict=True))
        if end_s < best[0]:
            best = end_s, ordered, runs
    groups: Groups = [[] for _ in seconds]
    begin = 0
    for rank, count in zip(best[1], best[2], strict=True):
        groups[rank] = order[begin : begin + count]
        begin += count
    return groups


def of_few_counts(
    deal: Deal,
    costs: Sequence[float],
    seconds: Sequence[float],
    most: Sequence[float],
    used: list[tuple[int, ...]],
    work: Callable[[list[float]], float],
) -> Groups:
    """Return the samples of each rank, of which no batch has more than six sizes over time.

    If new numbers of samples would, those among the earlier ones are taken that end first within the limits.

    Args:
        deal: how samples are dealt.
        costs: cost of each sample.
        seconds: seconds of each rank per unit of cost.
        most: largest cost of each rank's batch, if the samples can be dealt so.
        used: numbers of samples of the ranks that were used before, to which new ones are added.
        work: cost of a batch, from those of its samples.
    """
    groups = deal(costs, seconds, most)
    new = tuple(map(len, groups))
    if new in used or are_few([new, *used]):
        if new not in used:
            used.append(new)
        return groups

    def rating(each: Groups) -> tuple[bool, float]:
        loads = [work([costs[sample] for sample in group]) for group in each]
        is_over = any(load > limit for load, limit in zip(loads, most, strict=True))
        return is_over, max(load * rank_s for load, rank_s in zip(loads, seconds, strict=True))

    return min((deal(costs, seconds, most, counts) for counts in used if sum(counts) == len(costs)), key=rating)


def _runs(lengths: Sequence[float], seconds: Sequence[float], most: Sequence[float]) -> list[int]:
    """Return the numbers of samples of consecutive ranks that end first, by halving the time in which all end."""
    low, high = 0.0, lengths[0] * len(lengths) * max(seconds)
    found = _counts(lengths, seconds, high, most) or _counts(lengths, seconds, high, [inf] * len(seconds))
    assert found is not None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        counts = _counts(lengths, seconds, middle, most)
        if counts is None:
            low = middle
        else:
            high, found = middle, counts
    return found


def _counts(
    lengths: Sequence[float], seconds: Sequence[float], limit_s: float, most: Sequence[float]
) -> list[int] | None:
    """Return numbers of samples with which each rank ends within a time; None if there are none."""
    counts, begin = [], 0
    for number, cost_s in enumerate(seconds):
        longest = lengths[begin]
        fitting = int(min(limit_s / cost_s, most[number]) / longest * (1 + 1e-12))
        left = len(lengths) - begin - (len(seconds) - number - 1)  # one sample at least for each rank after it
        if fitting < 1:
            return None
        counts.append(min(fitting, left))
        begin += counts[-1]
    return counts if begin == len(lengths) else None
