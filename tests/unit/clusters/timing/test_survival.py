"""Censored tasks: the Kaplan-Meier estimate and imputed times."""

import warnings
from dataclasses import replace
from fractions import Fraction
from math import log, prod
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.clusters.timing.survival import JUST_AFTER, Survival, impute_censored
from paceline.errors import PacelineWarning
from paceline.recording.run_folder import SavedRun
from paceline.utils.rng import stream
from trace_rows import CENSORED, CLUSTER, replayed, row, rows_of, trained


@pytest.mark.parametrize("run", [pl.simulate, lambda *given, updates: trained(*given, updates)])
@pytest.mark.parametrize("protocol", ["bsp", "asp", "k_sync(k=1)@seconds=0.5 >> asp", "pull(k=1)"])
def test_a_protocol_that_never_interrupts_is_refused_where_the_trace_is_censored(run, protocol):
    words = r"1 of 3 rows of yesterday are censored: .* never interrupts work, .*censored=\"km\""
    with pytest.raises(pl.UsageError, match=words):
        run(protocol, pl.Cluster(1, CENSORED), updates=1)
    with warnings.catch_warnings(action="ignore", category=PacelineWarning):
        run(protocol, pl.Cluster(1, replace(CENSORED, censored="km")), updates=2)


def interrupted_after(seen_s):
    """Return a trace of two workers in which the second is interrupted when it had been seen for so long."""
    return pl.timing.Trace([*rows_of([1.0, 1.0]), *rows_of([seen_s, 1.0], worker=1, censored=[0])])


def test_a_task_cut_off_by_the_end_of_the_trace_uses_the_first_row():
    trace = pl.timing.Trace([*rows_of([1.0, 2.0, 0.3], 0, censored=[2]), *rows_of([0.5, 7.0], 1, censored=[1])])
    assert replayed(trace, (0, 3, 0.0)) == [1.0]
    assert replayed(trace, (1, 2, 0.0)) == [pytest.approx(7.7)]  # longer than its first, as was seen
    assert pl.simulate("asp", pl.Cluster(2, trace), updates=4).time_s == 4.0


def test_a_censored_task_may_run_a_tenth_longer():
    assert pl.simulate("k_sync(k=1)", pl.Cluster(2, interrupted_after(0.95)), updates=1).time_s == 1.0
    with pytest.raises(pl.RunError, match=r"worker 1 .* draw 1 .* interrupted after 0\.9 s.*censored=\"km\""):
        pl.simulate("k_sync(k=1)", pl.Cluster(2, interrupted_after(0.9)), updates=1)


def test_a_run_that_exceeds_a_censored_time_keeps_its_model(tmp_path):
    with pytest.raises(pl.RunError, match='censored="km"'):
        trained("k_sync(k=2)", pl.Cluster(2, interrupted_after(1.5)), out=tmp_path / "run")
    assert (tmp_path / "run/model.safetensors").exists()
    assert len(list(SavedRun(tmp_path / "run").history)) > 1


def test_real_workers_refuse_a_delay_of_unknown_length():
    with pytest.raises(pl.UsageError, match="must sleep for a known time"):
        trained("k_sync(k=1)", pl.LocalCluster(1, slowness=pl.Cluster(1, CENSORED)))


def test_the_estimate_equals_the_textbook_kaplan_meier_estimate():
    # Remission of leukemia under 6-MP, weeks: Freireich et al. 1963, in every textbook of survival analysis.
    ended = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    seen = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    survival = Survival(rows_of([*ended, *seen], censored=range(len(ended), 21)))
    found = dict(zip(survival.times_s, survival.probabilities, strict=True))
    expected = {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448}
    assert {weeks: round(found[weeks], 3) for weeks in expected} == expected


def survival_by_hand(rows, at_s):
    ends = {each.total_s for each in rows if not each.censored and each.total_s <= at_s}
    died = {end: sum(each.total_s == end and not each.censored for each in rows) for end in ends}
    return prod(1 - Fraction(died[end], sum(each.total_s >= end for each in rows)) for end in ends)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12).filter(
        lambda times: not all(censored for _, censored in times)
    ),
    st.integers(0, 9),
    st.integers(0, 996),
)
def test_an_imputed_time_is_the_conditional_quantile(times, seen_s, step):
    rows = [row(draw=draw, total_s=float(total_s), censored=int(c)) for draw, (total_s, c) in enumerate(times, start=1)]
    u = Fraction(2 * step + 1, 1994)  # 997 is prime: never on a step of the estimate
    left = (1 - u) * survival_by_hand(rows, seen_s)
    later = sorted(each.total_s for each in rows if survival_by_hand(rows, each.total_s) < left)
    end_s = later[0] if later else tail_end(rows, left)
    expected = max(end_s, seen_s * JUST_AFTER)
    assert Survival(rows).time_after(float(seen_s), float(u)) == pytest.approx(expected, rel=1e-9)


def tail_end(rows, left):
    """Return where the exponential tail falls to `left`: its rate is that of the ends after the median end."""
    longest_s = max(each.total_s for each in rows)
    middle_s = median(each.total_s for each in rows if not each.censored)
    after = [each for each in rows if each.total_s > middle_s]
    ends = sum(not each.censored for each in after)
    seconds = sum(each.total_s - middle_s for each in after)
    return longest_s + (log(survival_by_hand(rows, longest_s) / left) * seconds / ends if ends and left else 0.0)


@pytest.mark.slow
def test_an_exponential_tail_is_estimated_from_an_early_end():
    times_s = stream(3, "test").exponential(1.0, 3000)
    rows = rows_of(np.minimum(times_s, 0.8), censored=set(np.flatnonzero(times_s > 0.8)))
    done = [each.total_s for each in impute_censored(rows, seed=0)]
    assert np.mean(done) == pytest.approx(1.0, rel=0.05)
    assert np.quantile(done, 0.99) == pytest.approx(np.log(100), rel=0.1)


def test_the_smallest_uniform_number_draws_an_observed_end():
    assert Survival(rows_of([1.0, 2.0, 3.0], censored=[0])).time_after(0.0, u=0.0) == 2.0


def test_without_censoring_the_estimate_is_the_empirical_distribution():
    totals_s = tuple(stream(0, "test").exponential(size=50))
    u = (stream(1, "test").integers(0, 50, size=200) + 0.5) / 50
    survival = Survival(rows_of(totals_s))
    expected = pl.timing.Empirical(totals_s).quantile(u)
    assert [survival.time_after(0.0, each) for each in u] == pytest.approx(list(expected), rel=1e-12)


@pytest.mark.slow
def test_imputed_times_have_the_mean_of_the_censored_times():
    rng = stream(0, "test")
    times_s, limits_s = rng.exponential(1.0, 5000), rng.exponential(3.0, 5000)
    seen_s = [min(pair) for pair in zip(times_s, limits_s, strict=True)]
    rows = rows_of(seen_s, censored={index for index in range(5000) if limits_s[index] < times_s[index]})
    done = [each.total_s for each in impute_censored(rows, seed=0)]
    assert sum(seen_s) / 5000 == pytest.approx(0.75, rel=0.05)
    assert sum(done) / 5000 == pytest.approx(1.0, rel=0.05)


@pytest.mark.slow
def test_imputed_times_depend_on_the_seed_and_never_shrink():
    trace = replace(pl.timing.Trace.of(trained(pl.k_sync(k=3), CLUSTER)), censored="km")
    first, again, other = (impute_censored(trace.rows, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert not any(each.censored for each in first)
    for before, after in zip(trace.rows, first, strict=True):
        assert after == before if not before.censored else after.total_s > before.total_s


def test_a_worker_with_few_finished_tasks_uses_the_times_of_all_with_a_warning():
    quick = rows_of([2.0] * 19 + [30.0])
    slow = rows_of([1.0, 1.0, 3.0], worker=1, censored=[0, 1, 2])
    with pytest.warns(PacelineWarning, match="worker 1 finished 0 of 3 round trips"):
        done = impute_censored([*quick, *slow], seed=0)
    assert {each.total_s for each in done[20:22]} <= {2.0, 30.0}
    assert done[22].total_s == pytest.approx(30.0)
