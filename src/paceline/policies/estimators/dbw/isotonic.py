"""Two-dimensional isotonic regression: exact weighted least squares, updated in place when data arrive.

Cells lie at (level, column). A cell *dominates* the cells whose level and column are both no greater. Its value must
not be below theirs:

    minimize  sum_c weight_c (mean_c - x_c)^2   subject to   x_a <= x_b  wherever b dominates a.

**Optimality.** The optimum is a partition of the cells into blocks, each at the weighted mean of its cells. A
partition is the optimum if and only if

1. the values do not decrease from a cell to one that dominates it, and
2. no upper set of a block (with a cell, all of the block that dominate it) has a mean above that of the block.

Condition 2 means that each block is the optimum of its own cells, so the partition is optimal without the constraints
between blocks. Condition 1 means that none of these constraints is violated.

**Update.** New data can violate condition 2 only in their own blocks, so these are split: by the upper set that
maximizes sum_c weight_c (mean_c - m) at the block's mean m, and then both parts again, until no set has a positive sum.
The values of an upper part stay above m and those of a lower part below it, so the result is the optimum of the cells.
Then condition 1 is checked around the changed cells. Blocks in violation are merged, each union is split in the same
way, and so on. The optimum without the constraints between blocks rises strictly with each merge. So no partition
occurs twice and the update terminates, in any order of violations. Violations that overlap at one value come first
(`isotonic_blocks.choose`), because chains of all of them could merge most of the order. Against rounding, a split must
gain more than a margin, which grows with the rounds until nothing is split.

**The best upper set** is a staircase: on each level it begins at a column, and on later levels not later. One greedy
pass over the cells finds it (`isotonic_blocks.best_split`), without a maximum flow. If the cells are a chain, adjacent
violators are pooled instead (`isotonic_blocks.pooled`), and nothing is split.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.policies.estimators.dbw.isotonic_blocks import Block, GridCell, choose, first_place, optimal_parts, unions

Floats = NDArray[np.float64]

SMALLEST_GAIN, GAIN_GROWTH = 2.0**-50, 1.25


class IsotonicFit:
    """Weighted least-squares fit that does not decrease with level or column, over the cells that have data.

    Args:
        columns: number of columns, >= 1; levels are any integers.

    Example:
        >>> fit = IsotonicFit(columns=3)
        >>> for column, mean in enumerate([1.0, 4.0, 2.0]):
        ...     fit.add(0, column, 1.0, mean)
        >>> fit.solve()
        >>> fit.values()
        {(0, 0): 1.0, (0, 1): 3.0, (0, 2): 3.0}
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._cells: dict[int, GridCell] = {}
        self._stale: set[Block] = set()
        self._emptied: set[GridCell] = set()
        # Values by row and column, one row per level with data, in two copies: a place without data is -inf in the
        # one for maxima and inf in the one for minima.
        self._rows: dict[int, int] = {}
        self._row_levels: list[int] = []
        self._new_levels: set[int] = set()
        self._floor = np.full((0, columns), -inf)
        self._ceiling = np.full((0, columns), inf)

    def cells(self) -> Iterator[GridCell]:
        """Yield the cells that have data."""
        return (cell for cell in self._cells.values() if cell.weight)

    def add(self, level: int, column: int, weight: float, mean: float) -> None:
        """Add data to a cell: their weight, > 0, and their mean."""
        cell = self._cells.get(level * self.columns + column) or self._new_cell(level, column)
        total = cell.weight = cell.weight + weight
        cell.mean += (mean - cell.mean) * (weight / total)
        self._stale.add(cell.block)

    def replace(self, level: int, column: int, weight: float, mean: float) -> None:
        """Replace the data of a cell by data of this weight, >= 0, and this mean; a weight of 0 empties the cell."""
        cell = self._cells.get(level * self.columns + column) or self._new_cell(level, column)
        cell.weight = weight
        cell.mean = mean
        self._stale.add(cell.block)
        if not weight:
            self._emptied.add(cell)

    def scale(self, factor: float, least: float) -> None:
        """Multiply all weights by a factor, > 0, which keeps the fit, but keep each weight at `least` or above."""
        for cell in self._cells.values():
            cell.weight *= factor
            if 0 < cell.weight < least:
                cell.weight = least
                self._stale.add(cell.block)

    def solve(self) -> None:
        """Make the fit optimal for all data."""
        self._drop_emptied()
        waiting = [block.cells for block in self._stale]
        self._stale.clear()
        margin = SMALLEST_GAIN
        postponed: list[Block] = []
        while waiting:
            changed = [cell for block in postponed for cell in (block.cells[0], block.cells[-1])]  # their extent
            for cells in waiting:
                for part, value in optimal_parts(cells, margin):
                    block = part[0].block
                    if block.cells is part:  # not split
                        block.value = value
                    else:
                        block = Block(part, value)
                        for cell in part:
                            cell.block = block
                    changed += part
            self._write(changed)
            violations = list(dict.fromkeys(self._violations(changed)))
            if not violations:
                return
            chosen, postponed = choose(violations)
            waiting = unions(chosen)
            margin *= GAIN_GROWTH

    def values(self) -> dict[tuple[int, int], float]:
        """Return the value of each cell that has data, by (level, column)."""
        return {(cell.level, cell.column): cell.block.value for cell in self._cells.values()}

    def below(self, level: int) -> Floats:
        """Return the lower bounds on a cell of this level, by column [columns]; -inf for no bound."""
        rows = bisect_right(self._row_levels, level)
        floor: Floats = np.maximum.accumulate(np.maximum.reduce(self._floor[:rows], initial=-inf))
        return floor

    def above(self, level: int) -> Floats:
        """Return the upper bounds on a cell of this level, by column [columns]; inf for no bound."""
        rows = bisect_left(self._row_levels, level)
        ceiling: Floats = np.minimum.accumulate(np.minimum.reduce(self._ceiling[rows:], initial=inf)[::-1])[::-1]
        return ceiling

    def state_dict(self) -> dict[str, Any]:
        """Return the data of each cell, and the blocks with their values and whether each must be solved again."""
        blocks = sorted({cell.block for cell in self._cells.values()}, key=first_place)
        return {
            "cells": [(cell.level, cell.column, cell.weight, cell.mean) for cell in self._cells.values()],
            "blocks": [(block in self._stale, block.value, [cell.place for cell in block.cells]) for block in blocks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state of a fit with the same number of columns, into a new fit."""
        for level, column, weight, mean in state["cells"]:
            self.replace(level, column, weight, mean)
        self._stale.clear()
        for is_stale, value, places in state["blocks"]:
            block = Block([self._cells[place] for place in places], value)
            for cell in block.cells:
                cell.block = block
            if is_stale:
                self._stale.add(block)
        self._write(list(self._cells.values()))

    def _new_cell(self, level: int, column: int) -> GridCell:
        place = level * self.columns + column
        cell = self._cells[place] = GridCell(place, level, column)
        cell.block = Block([cell], 0.0)
        if level not in self._rows:
            self._new_levels.add(level)
        return cell

    def _drop_emptied(self) -> None:
        for cell in self._emptied:
            if not cell.weight:
                del self._cells[cell.place]
                cell.block.cells.remove(cell)
                if cell.level in self._rows:
                    self._floor[self._rows[cell.level], cell.column] = -inf
                    self._ceiling[self._rows[cell.level], cell.column] = inf
                if not cell.block.cells:
                    self._stale.discard(cell.block)
        self._emptied.clear()

    def _write(self, changed: list[GridCell]) -> None:
        """Copy the values of cells into the arrays."""
        if self._new_levels:
            self._insert_rows()
        rows, columns = self._rows, self.columns
        at = np.array([rows[cell.level] * columns + cell.column for cell in changed], dtype=np.intp)
        values = np.array([cell.block.value for cell in changed])
        self._floor.reshape(-1)[at] = values
        self._ceiling.reshape(-1)[at] = values

    def _insert_rows(self) -> None:
        levels = sorted(self._new_levels.union(self._rows))
        self._new_levels.clear()
        kept = [row for row, level in enumerate(levels) if level in self._rows]
        floor, ceiling = self._floor, self._ceiling
        self._floor = np.full((len(levels), self.columns), -inf)
        self._ceiling = np.full((len(levels), self.columns), inf)
        self._floor[kept], self._ceiling[kept] = floor, ceiling
        self._rows = {level: row for row, level in enumerate(levels)}
        self._row_levels = levels

    def _violations(self, changed: list[GridCell]) -> Iterator[tuple[Block, Block]]:
        """Yield violating pairs of blocks: the first has the higher value, cells of the second dominate its cells.

        Unchanged cells do not violate each other. So the check covers the rows from the first changed one to the last,
        with the maxima of all rows before and the minima of all rows after.
        """
        levels = {cell.level for cell in changed}
        first, last = self._rows[min(levels)], self._rows[max(levels)]
        by_column = self._floor[first : last + 2].copy()
        if first:
            np.maximum.reduce(self._floor[: first + 1], out=by_column[0])
        np.maximum.accumulate(by_column, axis=0, out=by_column)
        needed = np.maximum.accumulate(by_column, axis=1)
        found = self._ceiling[first : last + 2]
        if last + 2 < len(self._ceiling):
            found = found.copy()
            np.minimum.reduce(self._ceiling[last + 1 :], out=found[-1])
        is_low = needed > found
        if not np.count_nonzero(is_low):
            return
        highs: dict[float, tuple[int, int]] = {}
        low_rows, columns = np.nonzero(is_low)
        for row, column, value in zip(
            low_rows.tolist(), columns.tolist(), needed[low_rows, columns].tolist(), strict=True
        ):
            high = highs.get(value)
            if high is None or high[0] > first + row or high[1] > column:  # no dominance between the two cells
                at = int(by_column[row, : column + 1].argmax())
                high = highs[value] = int(self._floor[: first + row + 1, at].argmax()), at
            low_row = first + row
            if low_row > last:
                low_row += int(self._ceiling[low_row:, column].argmin())
            yield self._block_at(*high), self._block_at(low_row, column)

    def _block_at(self, row: int, column: int) -> Block:
        return self._cells[self._row_levels[row] * self.columns + column].block
