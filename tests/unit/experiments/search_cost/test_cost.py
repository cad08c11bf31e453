"""The cost of a search: counted against every search one by one, against simulation, and in closed form."""

from itertools import combinations, pairwise, product
from math import inf, nan
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.experiments.search_cost.cost import Counting, SearchSetting, search_costs
from paceline.experiments.search_cost.recorded_runs import RecordedRun
from paceline.experiments.search_cost.recorded_search import RecordedSearch, Rung, recorded_search
from selections import parametrize_few

ALL = Counting(take_all=True)


def cost_of(search, bsp_runs, candidate_runs, counting=ALL):
    [found] = search_costs(search, [SearchSetting(bsp_runs, candidate_runs)], counting)
    return found


def one_by_one(search, bsp_runs, candidate_runs):
    """Go through every search there can be: each draw of BSP with each draw of each rung."""
    rungs = [
        list(combinations(rung.accuracies, min(candidate_runs, len(rung.accuracies))))
        if not rung.stands_alone
        else [rung.accuracies]
        for rung in search.ladder
    ]
    draws = list(combinations(search.bsp.accuracies, min(bsp_runs, len(search.bsp.accuracies))))
    costs, ends = [], []
    for bsp, *candidates in product(draws, *rungs):
        target = fmean(bsp) if bsp_runs else search.known_target
        paid, accepted = float(bsp_runs), 0
        for rung, draw in zip(search.ladder, candidates, strict=True):
            paid += candidate_runs * rung.time_s / search.bsp.time_s
            short = target - fmean(draw)
            if not short <= search.margin + 1e-12 or (search.two_sided and -short > search.margin + 1e-12):
                break
            accepted += 1
        costs.append(paid)
        ends.append(accepted)
    return fmean(costs), [ends.count(i) / len(ends) for i in range(len(rungs) + 1)]


accuracies = st.lists(st.integers(0, 12).map(lambda i: round(0.86 + i / 100, 2)), min_size=1, max_size=4)


@st.composite
def searches(draw):
    ladder = draw(st.lists(accuracies, min_size=1, max_size=3))
    rungs = []
    for depth, known in enumerate(ladder):
        alone = draw(st.booleans())
        rungs.append(
            Rung(
                fraction=0.5**depth / 2,
                accuracies=(max(known),) if alone else tuple(known),
                time_s=draw(st.floats(1, 200)),
                stands_alone=alone,
            )
        )
    margin = draw(st.sampled_from([0.0, 0.01, 0.03]))
    return RecordedSearch(
        bsp=Rung(fraction=1.0, accuracies=tuple(draw(accuracies)), time_s=100.0),
        ladder=tuple(rungs),
        margin=margin,
        two_sided=draw(st.booleans()),
    )


@given(searches(), st.integers(0, 3), st.integers(1, 3))
def test_counting_agrees_with_every_search_one_by_one(search, bsp_runs, candidate_runs):
    found = cost_of(search, bsp_runs, candidate_runs)
    cost, ends = one_by_one(search, bsp_runs, candidate_runs)
    assert found.cost == pytest.approx(cost)
    assert list(found.found.values()) == pytest.approx(ends)
    assert found.success == pytest.approx(ends[search.right])
    assert sum(found.found.values()) == pytest.approx(1)


@given(searches(), st.integers(0, 3), st.integers(1, 3))
def test_the_figures_follow_from_the_outcomes(search, bsp_runs, candidate_runs):
    found = cost_of(search, bsp_runs, candidate_runs)
    saved = 1 - search.found.time_s / search.bsp.time_s
    assert found.amortised == (inf if saved <= 0 else pytest.approx(found.cost / saved))
    assert found.effective * found.cost == pytest.approx(bsp_runs + candidate_runs * search.right)
    first, whole = search.ladder[0].time_s / 100, sum(rung.time_s for rung in search.ladder) / 100
    low, high = bsp_runs + candidate_runs * first, bsp_runs + candidate_runs * whole
    assert low - 1e-9 <= found.cost <= high + 1e-9
    assert (found.draws, found.cost_error, found.success_error) == (0, 0, 0)


MIXED = RecordedSearch(
    bsp=Rung(fraction=1.0, accuracies=(0.92, 0.93, 0.91, 0.922, 0.915), time_s=100.0),
    ladder=(
        Rung(fraction=0.5, accuracies=(0.925,), time_s=60.0, stands_alone=True),
        Rung(fraction=0.25, accuracies=(0.92, 0.91, 0.905, 0.93), time_s=40.0),
        Rung(fraction=0.125, accuracies=(0.91, 0.9, 0.915, 0.92, 0.89), time_s=25.0),
    ),
)


@parametrize_few("runs", [(0, 1), (0, 3), (1, 2), (3, 3), (5, 1)], keep=1)
def test_simulation_agrees_with_counting_within_its_error(runs):
    exact = cost_of(MIXED, *runs, Counting())
    simulated = cost_of(MIXED, *runs, Counting(exact_up_to=0, draws=20_000, seed=1))
    assert (exact.draws, simulated.draws) == (0, 20_000)
    assert abs(simulated.cost - exact.cost) <= 4 * simulated.cost_error
    assert abs(simulated.success - exact.success) <= 4 * simulated.success_error
    assert simulated.success_error == pytest.approx((exact.success * (1 - exact.success) / 20_000) ** 0.5, rel=0.05)
    costs = [MIXED.cost(*runs, accepted) for accepted in range(4)]
    spread = sum(p * (cost - exact.cost) ** 2 for p, cost in zip(exact.found.values(), costs, strict=True)) ** 0.5
    assert simulated.cost_error == pytest.approx(spread / 20_000**0.5, rel=0.05)


def test_a_simulation_is_determined_by_its_seed():
    once, again, other = (cost_of(MIXED, 2, 2, Counting(exact_up_to=0, draws=500, seed=seed)) for seed in (3, 3, 4))
    assert once == again
    assert once != other


def test_more_comparisons_than_the_limit_are_simulated():
    comparisons = 10 * (1 + 6 + 10)  # of the targets of two runs with the draws of two of each rung
    assert cost_of(MIXED, 2, 2, Counting(exact_up_to=comparisons)).draws == 0
    assert cost_of(MIXED, 2, 2, Counting(exact_up_to=comparisons - 1)).draws == 10_000


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("accuracy", [0.1, 0.57, 0.91, 0.9176])
def test_with_equal_accuracies_the_search_reaches_the_smallest_fraction(accuracy, two_sided):
    ladder = tuple(Rung(fraction=0.5**i, accuracies=(accuracy,) * 3, time_s=50.0) for i in (1, 2, 3))
    search = RecordedSearch(
        bsp=Rung(fraction=1.0, accuracies=(accuracy,) * 5, time_s=100.0), ladder=ladder, margin=0.0, two_sided=two_sided
    )
    for bsp_runs, candidate_runs in product((0, 1, 3, 5), (1, 2, 3)):
        found = cost_of(search, bsp_runs, candidate_runs)
        assert (found.success, search.found.fraction) == (1, 0.125)
        assert found.cost == pytest.approx(bsp_runs + 1.5 * candidate_runs)
        assert found.amortised == pytest.approx(2 * found.cost)


@pytest.mark.slow
@given(searches())
def test_with_all_runs_the_search_finds_the_true_fraction(search):
    most = max(len(rung.accuracies) for rung in (search.bsp, *search.ladder))
    assert cost_of(search, most, most).success == 1
    assert cost_of(search, 0, most).success == 1


@given(searches())
def test_a_larger_margin_accepts_no_fewer(search):
    margins = (0.0, 0.01, 0.02, 0.05, 1.0)
    one_sided = [RecordedSearch(bsp=search.bsp, ladder=search.ladder, margin=margin) for margin in margins]
    found = [cost_of(each, 2, 2) for each in one_sided]
    for less, more in pairwise(found):
        assert less.cost <= more.cost + 1e-9
    assert list(found[-1].found.values())[-1] == 1


def test_the_cost_of_a_two_step_search_matches_hand_calculation():
    search = RecordedSearch(
        bsp=Rung(fraction=1.0, accuracies=(0.9, 0.94), time_s=200.0),
        ladder=(
            Rung(fraction=0.5, accuracies=(0.91, 0.92), time_s=120.0),
            Rung(fraction=0.25, accuracies=(0.88, 0.93), time_s=80.0),
        ),
        margin=0.01,
    )
    # Target 0.92: 0.5 passes with both of its runs, 0.25 with one of two, and not with their mean, 0.905.
    one = cost_of(search, 0, 1)
    assert (one.cost, one.success) == (pytest.approx(0.6 + 0.4), 0.5)
    assert (one.amortised, one.effective) == (pytest.approx(1 / 0.4), pytest.approx(1.0))
    # Target 0.9 or 0.94: the first passes all but 0.88, the second only 0.93, which is never reached.
    new = cost_of(search, 1, 1)
    assert new.found == {1.0: 0.5, 0.5: 0.25, 0.25: 0.25}
    assert new.cost == pytest.approx(1 + 0.5 * 0.6 + 0.5 * 1.0)


def test_every_draw_with_a_diverged_run_fails():
    search = RecordedSearch(
        bsp=Rung(fraction=1.0, accuracies=(0.9,), time_s=100.0),
        ladder=(Rung(fraction=0.5, accuracies=(0.9, nan, 0.9, 0.9), time_s=50.0),),
        margin=1.0,
        truth=0.5,
    )
    assert cost_of(search, 0, 1).success == 0.75
    assert cost_of(search, 0, 2).success == 0.5
    assert cost_of(search, 0, 4).success == 0


def test_the_target_and_the_true_fraction_can_be_given():
    search = RecordedSearch(
        bsp=Rung(fraction=1.0, accuracies=(0.9,), time_s=100.0),
        ladder=(Rung(fraction=0.5, accuracies=(0.9, 0.8), time_s=50.0),),
        target=0.8,
    )
    assert (search.found.fraction, cost_of(search, 0, 1).success, cost_of(search, 1, 1).success) == (0.5, 1, 0.5)
    other = RecordedSearch(bsp=search.bsp, ladder=search.ladder, target=0.8, truth=1.0)
    assert (cost_of(other, 0, 1).success, cost_of(other, 0, 1).amortised) == (0, inf)


def test_by_default_the_settings_of_the_paper_with_enough_runs_are_used():
    few = RecordedSearch(
        bsp=Rung(fraction=1.0, accuracies=(0.9, 0.9, 0.9), time_s=100.0),
        ladder=(Rung(fraction=0.5, accuracies=(0.9, 0.9), time_s=50.0),),
    )
    asked = [str(each.setting) for each in search_costs(few)]
    assert asked == ["(No, 2, 2)", "(No, 1, 1)", "(No, 1, 2)", "(Yes, 0, 2)", "(Yes, 0, 1)"]
    assert len(search_costs(few, counting=ALL)) == 14


def test_too_few_runs_are_refused_unless_all_are_requested():
    for runs, where in (((0, 6), "25%, but only 4"), ((6, 1), "100%, but only 5")):
        with pytest.raises(UsageError, match=f"has 6 runs at {where} are recorded; give fewer"):
            cost_of(MIXED, *runs, Counting())
        assert cost_of(MIXED, *runs).cost > 0
    assert cost_of(MIXED, 0, 4, Counting()).cost > 0  # the first rung's only run stands alone


RUNS = {
    1.0: [RecordedRun(100.0, 0.9)],
    0.5: [RecordedRun(80.0, nan), RecordedRun(60.0, 0.91), RecordedRun(70.0, 0.93)],
    0.1: [RecordedRun(30.0, 0.88)],
    0.0: [RecordedRun(10.0, 0.5)],
}


def test_recorded_runs_are_mapped_to_the_fractions_of_the_search():
    assert [rung.fraction for rung in recorded_search(RUNS).ladder] == [0.5, 0.1]
    search = recorded_search(RUNS, [0.5, 0.125, 0.0], stand_ins={0.125: 0.1}, best_alone=[0.5])
    assert [rung.fraction for rung in search.ladder] == [0.5, 0.125, 0.0]
    assert search.ladder[0] == Rung(fraction=0.5, accuracies=(0.93,), time_s=70.0, stands_alone=True)
    assert search.ladder[1] == Rung(fraction=0.125, accuracies=(0.88,), time_s=30.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ladder": [0.5, 0.25]}, "no runs were recorded at 25%; give another stand-in, one of 100%, 50%"),
        ({"ladder": [0.5], "stand_ins": {0.5: 0.3}}, "at 30%, the stand-in for 50%"),
        ({"ladder": [0.1, 0.5]}, "the ladder is 10%, 50%; expected falling shares"),
        ({"ladder": []}, "the ladder is nothing; expected falling shares"),
        ({"ladder": [1.0, 0.5]}, "expected falling shares below 100%"),
        ({"ladder": [0.5], "best_alone": [0.1]}, "10% is not on the ladder; give one of 50%"),
        ({"ladder": [0.5], "truth": 0.1}, "truth=10% is not on the ladder; give one of 100%, 50%"),
        ({"margin": 1.5}, "margin=1.5 is not a number in"),
        ({"target": 92}, "target=92 is not a number in"),
    ],
)
def test_an_invalid_search_is_refused(options, said):
    with pytest.raises(UsageError, match=said):
        recorded_search(RUNS, **options)


def test_a_bsp_run_that_diverged_gives_no_target():
    with pytest.raises(UsageError, match="a recorded BSP run diverged"):
        recorded_search({**RUNS, 1.0: [RecordedRun(100.0, nan)]})


@pytest.mark.parametrize("text", ["5", "a+b", "2.5+1", "5+5+5", ""])
def test_a_setting_that_cannot_be_read_is_refused(text):
    with pytest.raises(UsageError, match=r"is not a search setting; type BSP runs \+ candidate runs"):
        SearchSetting.parse(text)


def test_a_setting_has_a_candidate_run_and_no_negative_one():
    assert SearchSetting.parse(" 5 + 3 ") == SearchSetting(5, 3)
    for text, said in (("5+0", "candidate_runs=0"), ("-1+2", "bsp_runs=-1")):
        with pytest.raises(UsageError, match=f"{said} is not a whole number"):
            SearchSetting.parse(text)
