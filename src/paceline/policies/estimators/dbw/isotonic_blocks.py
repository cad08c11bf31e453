"""Blocks of the isotonic fit: sets of cells with one value, and how they are merged and split.

The algorithm and the proof that it is optimal are in `isotonic`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from math import inf
from operator import attrgetter, mul

ROUNDING = 2.0**-48


class GridCell:
    """One cell of the order: its data and its block."""

    __slots__ = ("block", "column", "level", "mean", "place", "weight")

    def __init__(self, place: int, level: int, column: int) -> None:
        self.place = place
        self.level = level
        self.column = column
        self.weight = 0.0
        self.mean = 0.0
        self.block: Block


class Block:
    """Cells that share a value, in the order of their places."""

    __slots__ = ("cells", "value")

    def __init__(self, cells: list[GridCell], value: float) -> None:
        self.cells = cells
        self.value = value


Pair = tuple[Block, Block]  # in violation
Centre = tuple[float, list[float]]

_place = attrgetter("place")


def first_place(block: Block) -> int:
    """Return the first place of a block, which is unique to it."""
    return block.cells[0].place


def choose(pairs: list[Pair]) -> tuple[list[Pair], list[Block]]:
    """Return the violations to repair first, and the blocks that occur only in the others.

    Violations can connect most blocks of the order by chains of different values, though few of them overlap at any one
    value. So the violations around the median value are chosen. The same is repeated for those wholly above it and
    those wholly below it, as far as their blocks are free.
    """
    chosen: list[Pair] = []
    taken: set[Block] = set()
    waiting = [pairs]
    while waiting:
        free = [pair for pair in waiting.pop() if taken.isdisjoint(pair)]
        if free:
            middle = sorted(low.value for _, low in free)[len(free) // 2]
            above = [(high, low) for high, low in free if high.value > middle < low.value]
            below = [(high, low) for high, low in free if high.value < middle > low.value]
            apart = {*above, *below}
            around = [pair for pair in free if pair not in apart]
            chosen += around
            taken.update(*around)
            waiting += above, below
    return chosen, [block for pair in pairs for block in pair if block not in taken]


def unions(pairs: Iterable[Pair]) -> list[list[GridCell]]:
    """Return the cells of each connected set of blocks in these pairs, in the order of places."""
    groups: dict[Block, list[Block]] = {}
    for pair in pairs:
        a, b = (groups.setdefault(block, [block]) for block in pair)
        if a is not b:
            a += b
            for block in b:
                groups[block] = a
    different = {id(group): group for group in groups.values()}.values()
    return [sorted([cell for block in group for cell in block.cells], key=_place) for group in different]


def optimal_parts(cells: list[GridCell], margin: float) -> list[tuple[list[GridCell], float]]:
    """Return the blocks of the optimum of these cells, with their values.

    Args:
        cells: cells in the order of their places.
        margin: smallest relative difference of the means of two blocks, > 0.
    """
    if len(cells) == 1:
        return [(cells, cells[0].mean)]
    parts = []
    waiting: list[tuple[list[GridCell], Centre | None]] = [(cells, None)]
    while waiting:
        part, known = waiting.pop()
        if is_chain(part):
            parts += pooled(part, margin)
            continue
        value, gains = known or centre(part)
        lower, upper = best_split(part, gains)
        if lower and upper:
            low, high = centre(lower), centre(upper)
            if high[0] - low[0] > margin * (abs(high[0]) + abs(low[0])):
                waiting += (lower, low), (upper, high)
                continue
        parts.append((part, value))
    return parts


def is_chain(cells: list[GridCell]) -> bool:
    """Return whether each of these cells, in the order of their places, dominates those before it."""
    columns = [cell.column for cell in cells]
    return columns == sorted(columns)


def pooled(chain: list[GridCell], margin: float) -> list[tuple[list[GridCell], float]]:
    """Return the same as `optimal_parts` for a chain, by pooling adjacent violators in one pass."""
    begins: list[int] = []
    weights: list[float] = []
    means: list[float] = []
    for begin, cell in enumerate(chain):
        weight, mean = cell.weight, cell.mean
        while means and mean - means[-1] <= margin * (abs(mean) + abs(means[-1])):
            begin = begins.pop()
            weight += weights[-1]
            mean += (means.pop() - mean) * (weights.pop() / weight)
        begins.append(begin)
        weights.append(weight)
        means.append(mean)
    if len(begins) == 1:
        return [(chain, mean)]
    return [(chain[begin:end], mean) for begin, end, mean in zip(begins, [*begins[1:], None], means, strict=True)]


def centre(cells: list[GridCell]) -> Centre:
    """Return the weighted mean of cells, and weight * (mean of the cell - that mean) for each.

    The computation uses offsets from one of the means, so that rounding is small compared with their differences. The
    mean of equal values is exact.
    """
    if len(cells) == 1:
        return cells[0].mean, [0.0]
    first = cells[0].mean
    weights = [cell.weight for cell in cells]
    offsets = [cell.mean - first for cell in cells]
    shift = sum(map(mul, weights, offsets)) / sum(weights)
    return first + shift, [weight * (offset - shift) for weight, offset in zip(weights, offsets, strict=True)]


def best_split(cells: list[GridCell], gains: list[float]) -> tuple[list[GridCell], list[GridCell]]:
    """Return the cells outside and inside the upper set with the largest sum of gains.

    Each negative gain consumes positive gains of cells that its cell dominates, from the last column backwards, because
    more of the later cells dominate the other columns. The remaining gains add up to the largest sum. Nothing is split
    if that sum is within rounding.

    The remainder from a column on does not depend on smaller columns. So on each level, from the last one backwards,
    the set begins at the first column with a remainder after that level, but not before its first column one level
    later.
    """
    columns: list[int] = []
    spare: list[float] = []
    after: list[tuple[int, list[int]]] = []
    level = cells[0].level
    for cell, gain in zip(cells, gains, strict=True):
        if cell.level != level:
            after.append((level, columns.copy()))
            level = cell.level
        at = bisect_right(columns, cell.column)
        if gain > 0:
            columns.insert(at, cell.column)
            spare.insert(at, gain)
        while gain < 0 and at:
            at -= 1
            gain += spare[at]
            if gain > 0:
                spare[at] = gain
            else:
                del columns[at], spare[at]
    if not spare or sum(spare) <= ROUNDING * sum(map(abs, gains)):
        return cells, []
    after.append((level, columns))
    begins: dict[int, float] = {}
    begin: float = -1
    for level, columns in reversed(after):
        at = bisect_left(columns, begin)
        begin = begins[level] = columns[at] if at < len(columns) else inf
    lower = [cell for cell in cells if cell.column < begins[cell.level]]
    upper = [cell for cell in cells if cell.column >= begins[cell.level]]
    return lower, upper
