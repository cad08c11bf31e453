"""Costs of samples: what is given for them, and what a data set knows."""

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.shares.costs import cost_function


class Columns(dict):
    """Data set of Hugging Face, as far as its columns go."""

    @property
    def column_names(self):
        return list(self)

    def __len__(self):
        return len(next(iter(self.values())))


def costs(given, dataset):
    cost_of = cost_function(given, dataset)
    return cost_of and [cost_of(index) for index in range(len(dataset))]


def test_lengths_of_a_data_set_are_its_costs():
    assert costs(None, Columns(length=[3, 0, 5])) == [3, 1, 5]
    assert costs(None, [{"input_ids": [7] * count} for count in (3, 0, 5)]) == [3, 1, 5]


@pytest.mark.parametrize(
    "dataset", [[1, 2, 3], [], Columns(text=["a", "b"]), Columns(length=[4, 4]), [{"x": [1]}, {"x": [1, 2]}]]
)
def test_without_lengths_that_differ_costs_are_unknown(dataset):
    assert costs(None, dataset) is None


def test_lengths_may_be_no_costs():
    assert costs("none", Columns(length=[3, 4, 5])) is None


def test_costs_come_from_a_file_or_a_function(tmp_path):
    np.save(tmp_path / "costs.npy", np.array([1.5, 2, 3]))
    assert costs(str(tmp_path / "costs.npy"), Columns(length=[9, 8, 7])) == [1.5, 2, 3]
    assert costs(lambda index: index + 1, Columns(length=[9, 8, 7])) == [1, 2, 3]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (np.ones(2), r"has the shape \(2,\), expected a cost for each of 3 samples"),
        (np.array([1.0, 0, 2]), "costs that are not positive"),
        (np.array([1.0, np.nan, 2]), "costs that are not positive"),
        (np.array([1.0, np.inf, 2]), "costs that are not positive"),
    ],
)
def test_a_file_without_a_positive_cost_for_each_sample_is_refused(tmp_path, given, told):
    np.save(tmp_path / "costs.npy", given)
    with pytest.raises(UsageError, match=told):
        cost_function(str(tmp_path / "costs.npy"), [1, 2, 3])


def test_a_file_that_is_none_of_numpy_is_refused(tmp_path):
    (tmp_path / "costs.npy").write_text("1 2 3")
    for name in ("costs.npy", "other.npy"):
        with pytest.raises(UsageError, match="cannot be read as an array of numpy"):
            cost_function(str(tmp_path / name), [1, 2, 3])


@pytest.mark.parametrize("cost", [0, -1.0, float("nan"), float("inf")])
def test_a_function_that_returns_no_positive_cost_is_refused(cost):
    cost_of = cost_function(lambda _: cost, [1, 2])
    with pytest.raises(UsageError, match="expected a positive number"):
        cost_of(0)
