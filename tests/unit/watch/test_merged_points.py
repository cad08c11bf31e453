from math import isfinite, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.watch.merged_points import MergedPoints

VALUES = st.one_of(st.floats(-1e3, 1e3), st.just(nan))


def filled(values, most):
    points = MergedPoints(("x",), ("y",), most)
    for x, value in enumerate(values, start=1):
        points.add((x,), (value,))
        assert len(points) <= most
    return points


@settings(max_examples=40)
@given(st.lists(VALUES, max_size=200), st.sampled_from([2, 4, 10]))
def test_points_are_means_of_equally_many_rows_and_end_with_the_last_one(values, most):
    columns = filled(values, most).columns()
    x, y = columns["x"].tolist(), columns["y"].tolist()
    rows_each = x[0] if x else 0
    assert x == [*np.arange(1, len(x)) * rows_each, len(values)] if x else not values
    begins = [0, *map(int, x)]
    for begin, end, mean in zip(begins, begins[1:], y, strict=False):
        known = [value for value in values[begin:end] if isfinite(value)]
        assert mean == pytest.approx(np.mean(known) if known else nan, nan_ok=True, abs=1e-9)


@settings(max_examples=20)
@given(st.lists(VALUES, max_size=10))
def test_a_short_curve_is_exact(values):
    assert filled(values, 10).columns()["y"].tolist() == pytest.approx(values, nan_ok=True, rel=0, abs=0)


def test_a_long_curve_keeps_at_least_half_of_its_points():
    assert len(filled([1.0] * 10_000, 100)) >= 50
