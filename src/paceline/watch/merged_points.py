"""Curves of bounded length: neighbouring points are merged when a curve is full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan

import numpy as np

from paceline.report.run_data import Column

MOST_POINTS = 1_000


class MergedPoints:
    """Curve points, each the mean of equally many consecutive rows; the last point may have fewer.

    A full curve merges its points pairwise, which halves their number and doubles the rows of each.

    Args:
        axes: names of the positions of a row; a point has the positions of its last row.
        values: names of the values of a row; a point has the means of the finite ones, nan without one.
        most: largest number of points, even, >= 2.
    """

    def __init__(self, axes: Sequence[str], values: Sequence[str], most: int = MOST_POINTS) -> None:
        self._names = (*axes, *values)
        self._most = most
        self._rows_each = 1
        self._rows_in_last = 1  # of rows_each
        self._positions: list[Sequence[float]] = []
        self._sums: list[list[float]] = []
        self._counts: list[list[float]] = []

    def __len__(self) -> int:
        return len(self._positions)

    def add(self, positions: Sequence[float], values: Sequence[float]) -> None:
        """Add a row."""
        sums = [value if isfinite(value) else 0.0 for value in values]
        counts = [float(isfinite(value)) for value in values]
        if self._positions and self._rows_in_last < self._rows_each:
            self._rows_in_last += 1
            self._positions[-1] = positions
            self._sums[-1] = _added(self._sums[-1], sums)
            self._counts[-1] = _added(self._counts[-1], counts)
            return
        if len(self._positions) == self._most:
            self._merge()
        self._rows_in_last = 1
        self._positions.append(positions)
        self._sums.append(sums)
        self._counts.append(counts)

    def _merge(self) -> None:
        self._rows_each *= 2
        self._positions = self._positions[1::2]
        self._sums = [_added(*pair) for pair in zip(self._sums[::2], self._sums[1::2], strict=True)]
        self._counts = [_added(*pair) for pair in zip(self._counts[::2], self._counts[1::2], strict=True)]

    def columns(self) -> Mapping[str, Column]:
        """Return positions and means by name."""
        means = [
            [total / count if count else nan for total, count in zip(sums, counts, strict=True)]
            for sums, counts in zip(self._sums, self._counts, strict=True)
        ]
        rows = [(*positions, *values) for positions, values in zip(self._positions, means, strict=True)]
        table = np.array(rows, dtype=float).reshape(-1, len(self._names))
        return dict(zip(self._names, table.T, strict=True))


def _added(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [first + second for first, second in zip(left, right, strict=True)]
