"""Selection of parameter combinations: few by default, the whole product in the slow suite."""

from itertools import product

import pytest


def each_value_once(*columns):
    """Return the product of some lists for `parametrize`.

    A combination is slow unless it is one of the fewest that have every value of every list.
    """
    usual = {tuple(at % len(column) for column in columns) for at in range(max(map(len, columns)))}
    return [
        pytest.param(*(column[at] for column, at in zip(columns, places, strict=True)), marks=marks)
        for places in product(*(range(len(column)) for column in columns))
        for marks in [() if places in usual else pytest.mark.slow]
    ]
