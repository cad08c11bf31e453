"""Least squares under a two-dimensional order, exact, and repaired in place when data come in.

Cells lie at (level, column). A cell *dominates* those at a level and a column that are both no greater, and its value
may not be below theirs:

    minimize  sum_c weight_c (mean_c - x_c)^2   subject to   x_a <= x_b  wherever b dominates a.

**Optimality.** The optimum is a partition of the cells into blocks, each at the weighted mean of its cells. A
partition is the optimum if and only if

1. the values do not decrease from a cell to one that dominates it, and
2. no upper set of a block (with a cell, all of the block that dominate it) has a mean above that of the block.

For 2 says that each block is the optimum of its own cells, so that the partition is the optimum if constraints between
blocks are left out, and 1 says that none of them is violated.

**Repair.** New data can break 2 only in the blocks that they fall into, so those are split: by the upper set that
maximizes sum_c weight_c (mean_c - m) at the block's mean m, and both parts again, until no set has a positive sum.
Values of an upper part end above m and those of a lower part below it, so this is the optimum of the block's cells.
Then 1 is checked around the cells that changed, blocks in violation are united, each union is split in the same way,
and so on. The optimum without the constraints between blocks rises strictly with each union, so no partition comes
twice and the repair ends. Rounding could break that argument, hence a split has to gain more than a margin, which grows
with the rounds until nothing is split.

**The best upper set** is a staircase: from a column on that does not increase with the level. With
S_l(j) the sum over the last j columns of a level,

    best_l(j) = S_l(j) + max_{i <= j} best_{l-1}(i),

one pass over the cells, and a second one back for the staircase. No network is built and no flow pushed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from math import inf
from operator import add, attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Partition = list[tuple[float, list[tuple[int, int]]]]

SMALLEST_GAIN, GAIN_GROWTH = 2.0**-50, 1.25


class Cell:
    """Data at one place of the order, and the block that they are in."""

    __slots__ = ("block", "column", "level", "mean", "place", "weight")

    def __init__(self, place: int, level: int, column: int) -> None:
        self.place = place
        self.level = level
        self.column = column
        self.weight = 0.0
        self.mean = 0.0
        self.block: Block


class Block:
    """Cells, in the order of their places, that share a value."""

    __slots__ = ("cells", "value")

    def __init__(self, cells: list[Cell], value: float) -> None:
        self.cells = cells
        self.value = value


class IsotonicFit:
    """The weighted least-squares fit that increases with level and column, over the cells that have data.

    Args:
        levels: their number, >= 1.
        columns: their number, >= 1.

    Example:
        >>> fit = IsotonicFit(levels=1, columns=3)
        >>> for column, mean in enumerate([1.0, 4.0, 2.0]):
        ...     fit.add(0, column, 1.0, mean)
        >>> fit.solve()
        >>> fit.values()
        {(0, 0): 1.0, (0, 1): 3.0, (0, 2): 3.0}
    """

    def __init__(self, levels: int, columns: int) -> None:
        self.columns = columns
        self._cells: dict[int, Cell] = {}
        self._stale: set[Block] = set()
        self._by_value: dict[float, set[Block]] = {}
        # The values twice: empty cells are neutral in a maximum of the one and in a minimum of the other.
        self._floor = np.full((levels, columns), -inf)
        self._ceiling = np.full((levels, columns), inf)

    def cells(self) -> Iterator[Cell]:
        """Yield the cells that have data."""
        yield from self._cells.values()

    def add(self, level: int, column: int, weight: float, mean: float) -> None:
        """Take in data of this weight (> 0) and this mean, into the mean of the cell."""
        cell = self._cell(level, column)
        cell.weight += weight
        cell.mean += (mean - cell.mean) * (weight / cell.weight)
        self._stale.add(cell.block)

    def replace(self, level: int, column: int, weight: float, mean: float) -> None:
        """Let these be all data of a cell; with a weight of 0 the cell has none any more."""
        cell = self._cell(level, column)
        cell.weight, cell.mean = weight, mean
        self._stale.add(cell.block)

    def scale(self, factor: float, least: float) -> None:
        """Multiply all weights, which changes nothing, but let none fall below the least."""
        for cell in self._cells.values():
            cell.weight *= factor
            if cell.weight < least:
                cell.weight = least
                self._stale.add(cell.block)

    def solve(self) -> None:
        """Make the fit optimal for all data taken in."""
        waiting = [block.cells for block in sorted(self._stale, key=_first_place)]
        for block in self._stale:
            self._forget(block)
        self._stale.clear()
        margin = SMALLEST_GAIN
        while waiting:
            changed: list[Cell] = []
            for cells in waiting:
                for part, value in optimal_parts(self._with_data(cells), margin):
                    self._enter(Block(part, value))
                    changed += part
            self._write(changed)
            waiting = self._unite(self._violations(changed))
            margin *= GAIN_GROWTH

    def values(self) -> dict[tuple[int, int], float]:
        """Return the value of each cell that has data, by (level, column)."""
        return {(cell.level, cell.column): cell.block.value for cell in self._cells.values()}

    def below(self, level: int) -> Floats:
        """Return what a cell of this level has to reach at least, by column [columns]; -inf for no bound."""
        floor: Floats = np.maximum.accumulate(self._floor[: level + 1].max(axis=0))
        return floor

    def above(self, level: int) -> Floats:
        """Return what a cell of this level may reach at most, by column [columns]; inf for no bound."""
        ceiling: Floats = np.minimum.accumulate(self._ceiling[level:].min(axis=0)[::-1])[::-1]
        return ceiling

    def state_dict(self) -> dict[str, Any]:
        """Return the data of each cell, and the blocks with their values and whether data came in since."""
        blocks = sorted({cell.block for cell in self._cells.values()}, key=_first_place)
        return {
            "cells": [(cell.place, cell.weight, cell.mean) for cell in self._cells.values()],
            "blocks": [(block.value, block in self._stale, [cell.place for cell in block.cells]) for block in blocks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, of a fit with as many levels and columns."""
        self.__init__(*self._floor.shape)  # type: ignore[misc]
        for place, weight, mean in state["cells"]:
            cell = self._cell(*divmod(place, self.columns))
            cell.weight, cell.mean = weight, mean
        self._stale.clear()
        self._by_value.clear()
        for value, is_stale, places in state["blocks"]:
            block = Block([self._cells[place] for place in places], value)
            self._enter(block)
            if is_stale:
                self._stale.add(block)
        self._write(list(self._cells.values()))

    def _cell(self, level: int, column: int) -> Cell:
        place = level * self.columns + column
        cell = self._cells.get(place)
        if cell is None:
            cell = self._cells[place] = Cell(place, level, column)
            self._enter(Block([cell], inf))
            self._stale.add(cell.block)
        return cell

    def _enter(self, block: Block) -> None:
        for cell in block.cells:
            cell.block = block
        self._by_value.setdefault(block.value, set()).add(block)

    def _forget(self, block: Block) -> None:
        peers = self._by_value[block.value]
        peers.remove(block)
        if not peers:
            del self._by_value[block.value]

    def _with_data(self, cells: list[Cell]) -> list[Cell]:
        for cell in cells:
            if not cell.weight:
                del self._cells[cell.place]
                self._floor.flat[cell.place], self._ceiling.flat[cell.place] = -inf, inf
        return [cell for cell in cells if cell.weight]

    def _write(self, changed: list[Cell]) -> None:
        places = [cell.place for cell in changed]
        self._floor.flat[places] = self._ceiling.flat[places] = [cell.block.value for cell in changed]

    def _violations(self, changed: list[Cell]) -> Iterator[tuple[Block, Block]]:
        """Yield pairs of blocks, the first one higher, where cells of the second dominate cells of the first.

        Unchanged cells are in order among themselves. So it is enough to look at the levels from the first changed to
        the last, with what all levels before ask for, and at the smallest values of the levels after.
        """
        if not changed:
            return
        levels = [cell.level for cell in changed]
        first, last = min(levels), max(levels)
        needed = self._floor[first : last + 2].copy()
        if first:
            np.maximum(needed[0], self._floor[:first].max(axis=0), out=needed[0])
        np.maximum.accumulate(needed, axis=0, out=needed)
        np.maximum.accumulate(needed, axis=1, out=needed)
        found = self._ceiling[first : last + 2]
        if last + 2 < len(self._ceiling):
            found = found.copy()
            np.minimum(found[-1], self._ceiling[last + 2 :].min(axis=0), out=found[-1])
        is_low = needed > found
        if not is_low.any():
            return
        for row, column in np.argwhere(is_low).tolist():
            high = self._block_of(float(needed[row, column]), range(first + row + 1), range(column + 1))
            levels_of_low = range(first + row, len(self._floor) if row == last + 1 - first else first + row + 1)
            low = self._block_of(float(found[row, column]), levels_of_low, range(column, column + 1))
            yield high, low

    def _block_of(self, value: float, levels: range, columns: range) -> Block:
        """Return the first block of this value that has a cell there."""
        blocks = self._by_value[value]
        if len(blocks) == 1:
            return next(iter(blocks))
        there = (b for b in blocks if any(cell.level in levels and cell.column in columns for cell in b.cells))
        return min(there, key=_first_place)

    def _unite(self, pairs: Iterable[tuple[Block, Block]]) -> list[list[Cell]]:
        """Take out the blocks of these pairs and return their cells, those of connected blocks together."""
        groups: dict[Block, list[Block]] = {}
        for pair in pairs:
            a, b = (groups.setdefault(block, [block]) for block in pair)
            if a is not b:
                a += b
                for block in b:
                    groups[block] = a
        unions = {id(group): group for group in groups.values()}.values()
        for block in groups:
            self._forget(block)
        return [sorted((cell for block in union for cell in block.cells), key=_place) for union in unions]


_place = attrgetter("place")


def _first_place(block: Block) -> int:
    return block.cells[0].place


def optimal_parts(cells: list[Cell], margin: float) -> Iterator[tuple[list[Cell], float]]:
    """Yield the blocks of the optimum of these cells, in the order of places, with their values.

    Args:
        cells: in the order of their places.
        margin: by how much, relative to their sizes, the means of two parts have to differ to be told apart.
    """
    waiting = [(cells, mean_of(cells))] if cells else []
    while waiting:
        part, value = waiting.pop()
        lower, upper = best_split(part, value) if len(part) > 1 else (part, [])
        if lower and upper:
            low, high = mean_of(lower), mean_of(upper)
            if high - low > margin * max(abs(high), abs(low)):
                waiting += (lower, low), (upper, high)
                continue
        yield part, value


def mean_of(cells: list[Cell]) -> float:
    """Return the weighted mean of cells."""
    if len(cells) == 1:
        return cells[0].mean
    return weighted_mean([cell.weight for cell in cells], [cell.mean for cell in cells])


def weighted_mean(weights: list[float], values: list[float]) -> float:
    """Return sum(weights * values) / sum(weights), and exactly the common value where all are equal."""
    first = values[0]
    return first + sum([weight * (value - first) for weight, value in zip(weights, values, strict=True)]) / sum(weights)


def best_split(cells: list[Cell], value: float) -> tuple[list[Cell], list[Cell]]:
    """Return these cells outside and inside of the upper set with the largest sum of weight * (mean - value)."""
    columns = sorted({cell.column for cell in cells}, reverse=True)
    rank = {column: j for j, column in enumerate(columns, start=1)}  # the last column is the first to be in the set
    rows: dict[int, list[float]] = {}
    for cell in cells:
        if cell.level not in rows:
            rows[cell.level] = [0.0] * (len(columns) + 1)
        rows[cell.level][rank[cell.column]] = cell.weight * (cell.mean - value)
    best = [0.0] * (len(columns) + 1)
    bests = []
    for row in rows.values():
        best = list(map(add, accumulate(row), accumulate(best, max)))
        bests.append(best)
    width = len(columns)
    widths = {}
    for level, best in zip(reversed(rows), reversed(bests), strict=True):
        width = max(range(width + 1), key=best.__getitem__)
        widths[level] = width
    lower: list[Cell] = []
    upper: list[Cell] = []
    for cell in cells:
        (upper if rank[cell.column] <= widths[cell.level] else lower).append(cell)
    return lower, upper
