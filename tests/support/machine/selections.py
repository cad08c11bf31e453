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


def parametrize_few(names, cases, keep, **options):
    """Return the mark `parametrize` with cases of which the first `keep` run by default, and the others are slow.

    It is for a rule that the first cases prove, where each further one costs much.
    """
    is_single = isinstance(names, str)
    sets = [case if hasattr(case, "marks") else pytest.param(*((case,) if is_single else case)) for case in cases]
    usual = [each for each in sets if not any(mark.name == "slow" for mark in each.marks)]
    slow = [pytest.param(*each.values, marks=pytest.mark.slow, id=each.id) for each in sets if each not in usual[:keep]]
    return pytest.mark.parametrize(names, [*usual[:keep], *slow], **options)


def parametrize_each_once(**columns):
    """Return the mark `parametrize` with the combinations of some values, of which few run by default.

    These are a smallest selection with every value; the others are slow. It is for values that a rule does not combine.

    Args:
        columns: values of an argument by its name; of several arguments by their names joined by `__`, as tuples.
    """
    names = [name.split("__") for name in columns]
    combined = each_value_once(*map(list, columns.values()))
    sets = [
        pytest.param(
            *(
                each
                for parts, value in zip(names, case.values, strict=True)
                for each in ((value,) if len(parts) == 1 else value)
            ),
            marks=case.marks,
        )
        for case in combined
    ]
    return pytest.mark.parametrize([each for parts in names for each in parts], sets)
