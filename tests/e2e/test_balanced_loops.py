"""Training loops under unequal shares: parameters and the steps to them are those of equal shares."""

import pytest

from balance_catalogue import LOOPS
from balanced_ranks import printed_by

COMPILED = tuple(name for name in LOOPS if "compiled" in name)
OTHERS = tuple(name for name in LOOPS if name not in COMPILED)
FIRST = ("accumulation_with_clipping", "tokens")


def results(loops, ranks):
    return {each["loop"]: each for each in printed_by("balance_ranks.py", loops, ranks)}


def check(found, loops):
    assert list(found) == list(loops)
    assert [each for each in found.values() if each["changes"] < 1] == []
    assert [each for each in found.values() if max(each["parameters"], each["steps"]) > 1e-12] == []


@pytest.mark.slow
def test_the_parameters_are_those_of_equal_shares():
    check(results(FIRST, 2), FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_parameters_of_every_loop_are_those_of_equal_shares(ranks):
    check(results(OTHERS, ranks), OTHERS)


@pytest.mark.slow
def test_the_parameters_of_compiled_loops_are_those_of_equal_shares():
    check(results(COMPILED, 2), COMPILED)


@pytest.mark.slow
def test_own_batches_are_those_of_one_process_that_replays_the_shares():
    [found] = printed_by("balance_own_batches.py", [], 2)
    assert len(found["sizes"]) > 2
    assert found["distance"] < 1e-12


@pytest.mark.slow
def test_a_script_that_calls_balance_has_the_parameters_of_equal_shares():
    [found] = printed_by("balance_by_call.py", [], 2)
    assert len(found["sizes"]) > 2
    assert found["distance"] < 1e-12
    assert "communication hook" in found["refused"][0]
    assert "does not deal its samples to 2 ranks" in found["refused"][1]
