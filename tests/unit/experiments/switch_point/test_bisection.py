"""Algorithm 1 of Sync-Switch: beside a literal transcription, on curves whose knee is known, and asked wrongly."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.experiments.switch_point.bisection import Bisection, accepts, converged_accuracy

shares = st.floats(0.01, 1.0)


def searched(bisection, train):
    """Return the fractions that were tried and the one that was found."""
    tried = []
    while (fraction := bisection.next_fraction(tried)) is not None:
        tried.append((fraction, train(fraction)))
    return [fraction for fraction, _ in tried], bisection.found(tried)


def algorithm_1(beta, M, A, train, one_sided):
    """Algorithm 1, line by line and in percent; alpha' is set to 0 for each setting, which the paper omits."""
    upper, lower, m = 100.0, 0.0, 0
    timings = []
    while m < M:
        alpha_sum = 0.0
        switching_timing = (upper + lower) / 2
        timings.append(switching_timing)
        accuracies = train(switching_timing / 100)
        for alpha_r in accuracies:
            alpha_sum = alpha_sum + alpha_r
        mean = alpha_sum / len(accuracies)
        if A - (beta + 1e-12) <= mean and (one_sided or mean <= A + (beta + 1e-12)):
            upper = switching_timing
        else:
            lower = switching_timing
        m = m + 1
    return [timing / 100 for timing in timings], upper / 100


@given(
    M=st.integers(1, 8),
    A=shares,
    beta=st.floats(0, 0.2),
    two_sided=st.booleans(),
    table=st.lists(st.lists(shares, min_size=1, max_size=3), min_size=8, max_size=8),
)
def test_decisions_equal_those_of_algorithm_1(M, A, beta, two_sided, table):
    def answers():
        rows = iter(table)
        return lambda fraction: next(rows)

    ours = searched(Bisection(target=A, margin=beta, settings=M, two_sided=two_sided), answers())
    assert ours == algorithm_1(beta, M, A, answers(), one_sided=not two_sided)


@given(thousandths=st.integers(1, 980), short=st.integers(1, 20))
def test_a_mean_that_differs_by_exactly_the_margin_is_accepted(thousandths, short):
    mean, target, margin = thousandths / 1000, (thousandths + short) / 1000, short / 1000
    assert accepts([mean], target, margin, two_sided=True)
    assert accepts([target], mean, margin, two_sided=True)


@given(knee=st.floats(0, 1), M=st.integers(1, 10), steepness=st.floats(0.1, 10))
def test_on_an_increasing_curve_the_knee_is_found_from_above(knee, M, steepness):
    def train(fraction):
        return [0.9 + steepness / 100 * (fraction - knee)]

    tried, found = searched(Bisection(target=0.9, margin=0.0, settings=M), train)
    assert len(set(tried)) == M
    smallest = min((fraction for fraction in tried if train(fraction)[0] >= 0.9), default=1.0)
    assert found == smallest
    assert knee - 1e-9 <= found <= knee + 2.0**-M + 1e-9


def test_without_an_accepted_fraction_the_first_protocol_runs_to_the_end():
    assert searched(Bisection(target=0.9, margin=0.01, settings=3), lambda fraction: [0.5]) == ([0.5, 0.75, 0.875], 1.0)


def test_if_every_fraction_is_accepted_the_smallest_is_found():
    assert searched(Bisection(target=0.9, margin=0.01, settings=3), lambda fraction: [0.9]) == (
        [0.5, 0.25, 0.125],
        0.125,
    )


def test_only_the_two_sided_rule_rejects_a_more_accurate_switch():
    def better(fraction):
        return [0.95]

    assert searched(Bisection(target=0.9, margin=0.01, settings=2), better)[1] == 0.25
    assert searched(Bisection(target=0.9, margin=0.01, settings=2, two_sided=True), better)[1] == 1.0


@pytest.mark.parametrize("lost", [None, nan, inf])
def test_one_diverged_run_rejects_its_setting(lost):
    assert accepts([0.99, 0.99], 0.9, 0.01)
    assert not accepts([0.99, lost, 0.99], 0.9, 0.01)
    assert not accepts([], 0.9, 0.01)


def test_bounds_are_inclusive():
    assert accepts([0.75], 1.0, 0.25)
    assert accepts([1.0], 0.75, 0.25, two_sided=True)
    assert not accepts([0.7499], 1.0, 0.25)
    assert not accepts([1.0], 0.7499, 0.25, two_sided=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target": 92.5}, "target=92.5, expected a share in (0, 1]; if this is percent, give 0.925"),
        ({"target": 0}, "target=0, expected a share in (0, 1]"),
        ({"target": nan}, "expected a share in (0, 1]"),
        ({"target": "high"}, "target='high', expected a share"),
        ({"margin": 1}, "margin=1, expected a share in [0, 1); if this is percent, give 0.01"),
        ({"margin": -0.01}, "margin=-0.01, expected a share"),
        ({"margin": True}, "margin=True, expected a share"),
        ({"settings": 0}, "settings=0 is not a whole number in [1, inf)"),
        ({"settings": 2.5}, "settings=2.5 is not a whole number in [1, inf)"),
    ],
)
def test_arguments_out_of_range_are_refused(change, words):
    with pytest.raises(pl.UsageError) as refusal:
        Bisection(**{"target": 0.9, **change})
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("accuracies", "converged"),
    [
        ([], None),
        ([0.5] * 4, None),
        ([0.5] * 5, 0.5),
        ([0.1, 0.9, 0.9, 0.9, 0.9, 0.901], 0.901),  # 0.1 % apart
        ([0.1, 0.9, 0.9, 0.9, 0.9, 0.9011], None),
        ([0.9, 0.9005, 0.901, 0.9015, 0.902, 0.9025], None),  # each step is small, five of them are not
        ([0.1, *[0.8] * 5, *[0.9] * 5], 0.8),  # the first five
    ],
)
def test_the_converged_accuracy_follows_five_evaluations_within_0_1_percent(accuracies, converged):
    assert converged_accuracy(accuracies) == converged
