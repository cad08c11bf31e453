"""Selection of parameter combinations: few by default, all in the slow suite."""

from itertools import product

import pytest


def each_value_once(*columns):
    """Return the product of some lists for `parametrize`.

    A combination is marked slow unless it is in a smallest selection with every value of every list.
    """
    usual = {tuple(at % len(column) for column in columns) for at in range(max(map(len, columns)))}
    return [
        pytest.param(*(column[at] for column, at in zip(columns, places, strict=True)), marks=marks)
        for places in product(*(range(len(column)) for column in columns))
        for marks in [() if places in usual else pytest.mark.slow]
    ]
