"""Isotonic fit: against other solvers, and where rounding could prevent its end."""

from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import isotonic_regression

from paceline.policies.estimators.dbw import isotonic_blocks as blocks
from paceline.policies.estimators.dbw.isotonic import IsotonicFit
from paceline.policies.estimators.dbw.isotonic_blocks import Block, GridCell, choose, optimal_parts, unions
from selections import parametrize_few


def random_fit(rng, levels, columns, adds, draw):
    fit = IsotonicFit(columns)
    for _ in range(adds):
        fit.add(int(rng.integers(levels)), int(rng.integers(columns)), float(rng.integers(1, 4)), float(draw()))
    return fit


@pytest.mark.parametrize("along", ["column", "level"])
@pytest.mark.parametrize("seed", range(10))
def test_the_fit_in_one_dimension_equals_that_of_scipy(seed, along):
    rng = np.random.default_rng(seed)
    weights, means = 10 ** rng.uniform(0, 9, 50), rng.normal(size=50) + np.linspace(0, 2, 50)
    fit = IsotonicFit(50 if along == "column" else 1)
    for place in rng.permutation(50):
        fit.add(*((0, place) if along == "column" else (place, 0)), weights[place], means[place])
        fit.solve()
    expected = isotonic_regression(means, weights=weights).x
    assert [value for _, value in sorted(fit.values().items())] == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_a_reversed_order_gives_reversed_values(seed):
    rng = np.random.default_rng(seed)
    fit, mirrored = IsotonicFit(6), IsotonicFit(6)
    for level, column, mean in zip(
        rng.integers(7, size=60), rng.integers(6, size=60), rng.normal(size=60), strict=True
    ):
        fit.add(level, column, 1.0, mean)
        mirrored.add(6 - level, 5 - column, 1.0, -mean)
    fit.solve()
    mirrored.solve()
    assert fit.values() == pytest.approx({(6 - r, 5 - c): -value for (r, c), value in mirrored.values().items()})


@parametrize_few("seed", range(5), keep=1)
def test_sequential_cells_in_a_sparse_grid(seed):
    rng = np.random.default_rng(seed)
    fit, data = IsotonicFit(12), []
    for _ in range(60):
        data.append((int(rng.integers(12)), int(rng.integers(12)), 1.0, float(rng.exponential())))
        fit.add(*data[-1])
        fit.solve()
        check_order(fit)
        fresh = IsotonicFit(12)
        for each in data:
            fresh.add(*each)
        fresh.solve()
        assert fit.values() == pytest.approx(fresh.values(), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [3e-16, 0.0, 1e-16, 1e-15, 1e-9])
def test_the_fit_terminates_on_values_that_differ_by_rounding(spread):
    rng = np.random.default_rng(0)
    fit = random_fit(rng, 30, 30, 2000, lambda: 1 / 3 + spread * rng.normal())
    fit.solve()
    for _ in range(20):
        fit.add(int(rng.integers(30)), int(rng.integers(30)), 1.0, 1 / 3 + spread * float(rng.normal()))
        fit.solve()
        check_order(fit)


@pytest.mark.timeout(20)
def test_the_fit_terminates_even_if_all_pairs_of_blocks_seem_violated(monkeypatch):
    def violations(fit, changed):
        blocks = list({cell.block: None for cell in changed})
        return pairwise(blocks)

    monkeypatch.setattr(IsotonicFit, "_violations", violations)
    fit = random_fit(np.random.default_rng(0), 5, 5, 50, np.random.default_rng(1).exponential)
    fit.solve()
    assert len(set(fit.values().values())) == 1


def check_order(fit):
    values = fit.values()
    for (level, column), value in values.items():
        assert fit.below(level)[column] == value == fit.above(level)[column]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_upper_set_of_a_block_has_a_mean_above_it(seed):
    rng = np.random.default_rng(seed)
    fit = random_fit(rng, 40, 40, 3000, rng.exponential)
    fit.solve()
    check_order(fit)
    data = {(cell.level, cell.column): (cell.weight, cell.mean) for cell in fit.cells()}
    values = fit.values()
    for _ in range(300):
        # Moving a part of a block up, from a random staircase on, must not help.
        value = values[list(values)[rng.integers(len(values))]]
        starts = np.sort(rng.integers(0, 41, size=40))[::-1]
        block = [cell for cell, of_cell in values.items() if of_cell == value]
        above = sum(data[cell][0] * (data[cell][1] - value) for cell in block if cell[1] >= starts[cell[0]])
        assert above <= 1e-9


@pytest.mark.parametrize("draw", ["normal", "few"])
@pytest.mark.parametrize("seed", range(20))
def test_pooling_and_splitting_a_chain_give_the_same_blocks(monkeypatch, seed, draw):
    rng = np.random.default_rng(seed)
    columns = np.sort(rng.integers(6, size=30))
    chain = [GridCell(9 * level + int(column), level, int(column)) for level, column in enumerate(columns)]
    for cell in chain:
        cell.weight = float(rng.integers(1, 4))
        cell.mean = float(rng.normal() if draw == "normal" else rng.integers(3))
    pooled = optimal_parts(chain, 2.0**-50)
    monkeypatch.setattr(blocks, "is_chain", lambda cells: False)
    split = sorted(optimal_parts(chain, 2.0**-50), key=lambda part: part[0][0].place)
    assert [part for part, _ in pooled] == [part for part, _ in split]
    assert [value for _, value in pooled] == pytest.approx([value for _, value in split], rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_every_violation_is_chosen_or_waits_for_one_that_is(seed):
    rng = np.random.default_rng(seed)
    values = np.sort(rng.integers(15, size=40) if seed % 2 else rng.normal(size=40)).tolist()
    order = [Block([], value) for value in values]
    at = [sorted(pair) for pair in rng.integers(40, size=(30, 2)).tolist() if values[pair[0]] != values[pair[1]]]
    pairs = [(order[high], order[low]) for low, high in at]
    chosen, postponed = choose(pairs)
    taken = {block for pair in chosen for block in pair}
    assert set(chosen) <= set(pairs)
    assert all(not taken.isdisjoint(pair) for pair in pairs)
    assert set(postponed) == {block for pair in pairs for block in pair} - taken


def test_a_chain_of_violations_is_not_merged_as_a_whole():
    chain = [Block([GridCell(place, 0, place)], float(-place)) for place in range(100)]
    chosen, _ = choose(list(pairwise(chain)))
    united = unions(chosen)
    assert max(map(len, united)) <= 3
    assert sum(map(len, united)) >= 66


@parametrize_few("seed", [536, *range(30)], keep=8)
def test_incremental_batches_with_ties_equal_one_batch(seed):
    rng = np.random.default_rng(seed)
    columns, means = int(rng.integers(2, 25)), int(rng.integers(2, 6))
    fit, fresh = IsotonicFit(columns), IsotonicFit(columns)
    for _ in range(rng.integers(1, 12)):
        for _ in range(rng.integers(1, 80)):
            data = int(rng.integers(columns)), int(rng.integers(columns)), 1.0, float(rng.integers(means))
            fit.add(*data)
            fresh.add(*data)
        fit.solve()
    fresh.solve()
    assert fit.values() == pytest.approx(fresh.values(), rel=1e-10, abs=1e-12)
    check_order(fit)
