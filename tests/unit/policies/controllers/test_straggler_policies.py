"""Detection of stragglers against the written rule, and what the policies of Sync-Switch do with it."""

from itertools import combinations
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.core.records import DecisionMade, GradientArrived, UpdateMade, WorkerLost
from paceline.policies.controllers.straggler_policies import Elastic, Greedy, _best_exclusion
from paceline.policies.estimators.speeds.stragglers import KNOWN, StragglerDetector, ThroughputStats
from selections import parametrize_few
from timed_runs import timed_run
from tiny_jobs import tiny_job


def observe(detector, times_s):
    """Let every worker deliver once, in a round."""
    for worker, busy_s in times_s.items():
        detector.observe(worker, busy_s, live=len(times_s))


def named(times_s):
    return dict(enumerate(times_s))


# -- the detector


def slow_by_the_rule(throughput, min_gap):
    """The rule of the cluster, literally."""
    mean = sum(throughput.values()) / len(throughput)
    sigma = sqrt(sum((each - mean) ** 2 for each in throughput.values()) / len(throughput))
    below = mean * (1 - 1e-9) - sigma  # not by rounding alone
    return {k for k, each in throughput.items() if each < below and each <= (1 - min_gap) * mean}


times = st.floats(0.1, 10.0)


@given(st.integers(3, 6).flatmap(lambda n: st.lists(st.lists(times, min_size=n, max_size=n), max_size=KNOWN)))
def test_a_window_is_judged_by_the_rule_of_the_cluster(rounds):
    detector = StragglerDetector(window=1, consecutive=1, min_gap=0.2)
    for times_s in rounds:
        observe(detector, named(times_s))
        assert detector.throughput == {k: 1 / each for k, each in enumerate(times_s)}
        assert detector.stragglers == slow_by_the_rule(detector.throughput, 0.2)


@given(st.lists(st.lists(times, min_size=3, max_size=3), min_size=2, max_size=40))
def test_the_detector_of_the_paper_compares_with_the_cluster_alone(rounds):
    """S - sigma over a sliding window of two rounds, twice in a row, from throughputs of the last two rounds alone."""
    detector = StragglerDetector(window=2, consecutive=2, min_gap=0.0, sliding=True, own_past=False)
    slow = [set(), set()]
    for before, times_s in zip([None, *rounds], rounds, strict=False):
        observe(detector, named(times_s))
        if before is not None:
            throughput = {k: 2 / sum(both) for k, both in enumerate(zip(before, times_s, strict=True))}
            slow.append(slow_by_the_rule(throughput, 0.0))
        assert detector.stragglers == slow[-1] & slow[-2]


@pytest.mark.parametrize(("sliding", "expected"), [(False, [6, 9]), (True, [4, 9])])
def test_windows_are_adjacent_or_overlap(sliding, expected):
    detector = StragglerDetector(window=3, consecutive=2, sliding=sliding)
    changes, was = [], False
    for update in range(1, 13):
        observe(detector, {0: 1.0, 1: 1.0, 2: 1.0, 3: 9.0 if update <= 6 else 1.0})
        if (3 in detector.stragglers) is not was:
            was = not was
            changes.append(update)
    assert changes == expected


def test_the_throughput_of_a_window_is_gradients_by_busy_seconds():
    detector = StragglerDetector(window=2)
    for busy_s in (1.0, 3.0):
        observe(detector, {0: busy_s, 1: 2.0, 2: 2.0})
    assert detector.throughput == {0: 2 / 4, 1: 0.5, 2: 0.5}


def test_a_worker_without_gradients_in_a_window_keeps_its_state():
    detector = StragglerDetector(window=1, consecutive=2)
    observe(detector, named([9, 1, 1, 1]))
    for _ in range(4):  # asynchronously: four arrivals of the others are a round
        detector.observe(1, 1.0, live=4)
    assert detector.stragglers == set()
    observe(detector, named([9, 1, 1, 1]))
    assert detector.stragglers == {0}
    observe(detector, named([1, 1, 1, 1]))
    assert detector.stragglers == set()


def test_a_worker_slower_by_less_than_the_gap_is_not_a_straggler():
    for gap, found in ((0.2, set()), (0.1, {0})):
        detector = StragglerDetector(window=1, consecutive=1, min_gap=gap)
        observe(detector, named([1.2, 1, 1, 1, 1, 1]))
        assert detector.stragglers == found


@pytest.mark.parametrize(("n", "slow"), [(2, {1}), (4, {2, 3}), (8, {4, 5, 6, 7}), (5, {0, 1, 2})])
def test_stragglers_in_half_of_the_cluster_are_detected_by_their_own_history(n, slow):
    detector = StragglerDetector(window=1, consecutive=2)
    rng = np.random.default_rng(0)
    for _ in range(KNOWN):
        observe(detector, named(rng.uniform(0.95, 1.05, n)))
    for _ in range(2):
        observe(detector, {k: 5.0 if k in slow else 1.0 for k in range(n)})
    assert slow_by_the_rule(detector.throughput, 0.2) & slow == set(), "which the rule of the cluster does not see"
    assert detector.stragglers == slow


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_slowdown_of_all_workers_has_no_stragglers(n):
    detector = StragglerDetector(window=1, consecutive=1)
    rng = np.random.default_rng(0)
    for factor in [1] * 8 + [4] * 8:
        observe(detector, named(factor * rng.uniform(0.95, 1.05, n)))
        assert detector.stragglers == set()


def test_a_constantly_slower_worker_is_normal_by_its_own_history_only():
    detector = StragglerDetector(window=1, consecutive=2)
    for _ in range(20):
        observe(detector, named([2.0, 1.0]))
    assert detector.stragglers == set(), "two workers: only a change identifies the straggler"


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30))
def test_the_history_is_mean_and_population_deviation(values):
    past = ThroughputStats()
    for value in values:
        past.add(value)
    assert (past.mean, past.deviation) == pytest.approx((np.mean(values), np.std(values)), rel=1e-6, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 4), times, st.integers(1, 5)), max_size=60), st.booleans(), st.integers(0, 59))
def test_a_detector_continues_from_its_state(arrivals, sliding, at):
    whole, part = (StragglerDetector(window=2, sliding=sliding) for _ in range(2))
    for i, arrival in enumerate(arrivals):
        whole.observe(*arrival)
        if i == at:
            state = part.state_dict()
            part = StragglerDetector(window=2, sliding=sliding)
            part.load_state_dict(state)
        part.observe(*arrival)
    assert part.state_dict() == whole.state_dict()


def test_noise_of_20_percent_is_distinguished_from_a_straggler():
    """The bars of benchmarks/stragglers.py, in short."""
    rng, flagged, found = np.random.default_rng(1), 0, 0
    detector = StragglerDetector()
    for _ in range(800):
        observe(detector, named(np.maximum(0.05, 1 + 0.2 * rng.standard_normal(8))))
        flagged += len(detector.stragglers)
    for _ in range(50):
        detector = StragglerDetector()
        for update in range(20):
            busy_s = np.maximum(0.05, 1 + 0.2 * rng.standard_normal(8))
            observe(detector, named(busy_s * [1 + (update >= 14), *[1] * 7]))
        found += 0 in detector.stragglers
    assert flagged / (800 * 8) < 0.01
    assert found >= 48


# -- the policies


def slow_while(spans, n=4, factor=5, **more):
    """Return a cluster where (worker, from, to) are slow, with little noise."""
    slowdowns = [
        pl.timing.Slowdown(at_s=at_s, until_s=to_s, factor=factor, workers=(worker,)) for worker, at_s, to_s in spans
    ]
    return pl.Cluster(n, timing=pl.timing.Uniform(0.95, 1.05), slowdowns=slowdowns, **more)


def run(protocol, cluster, stop="gradients=400"):
    return timed_run(protocol, cluster, stop, worker_timeout_s=1e6)


def decided(result, *kinds):
    return [(r.kind, r.worker) for r in result.history.of(DecisionMade) if r.kind in kinds]


@parametrize_few("protocol", ["asp", "bsp", "k_batch_async(k=3)", "ssp(lead=4)"], keep=1)
def test_detection_reports_stragglers_under_any_protocol_and_changes_nothing(protocol):
    cluster = slow_while([(2, 8, 25)], factor=3)
    watched = run(f"{protocol} + stragglers", cluster, stop="gradients=160")
    assert decided(watched, "straggler", "recovered") == [("straggler", 2), ("recovered", 2)]
    assert decided(watched, "set_aside", "take_back") == []
    assert watched.time_s == run(protocol, cluster, stop="gradients=160").time_s


@pytest.mark.slow
def test_a_run_without_gradients_has_the_decisions_and_times_of_a_training():
    """The tests below need no gradients."""
    protocol, cluster, stop = "bsp + elastic@50% >> asp", slow_while([(2, 8, 25)]), "gradients=160"
    trained = pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop=stop, worker_timeout_s=1e6)
    ours, theirs = (
        [(r.now_s, r.kind, r.worker, r.reason) for r in each.history.of(DecisionMade)]
        for each in (run(protocol, cluster, stop), trained)
    )
    assert ours == theirs


@pytest.fixture(scope="module")
def greedy():
    """Run with greedy in its first half, and a straggler meanwhile."""
    return run("bsp + greedy@50% >> asp", slow_while([(1, 10, 30)]))


def test_greedy_is_asynchronous_while_there_is_a_straggler(greedy):
    protocols = [r.reason for r in greedy.history.of(DecisionMade) if r.kind == "protocol"]
    assert protocols == [
        "bsp: the run begins",
        "asp: worker 1 fell behind",
        "bsp: all stragglers have recovered",
        "asp: 200 gradients reached",
    ]


def test_greedy_completes_the_share_of_bsp(greedy):
    *_, back, after = [r.now_s for r in greedy.history.of(DecisionMade) if r.kind == "protocol"]
    updates = greedy.history.of(UpdateMade)
    synchronous = [u.k for u in updates if u.reason == "every live worker has contributed"]
    assert 200 <= sum(synchronous) < 200 + 4
    assert any(u.k == 1 and u.now_s < back for u in updates)
    assert max(u.now_s for u in updates if u.reason == "every live worker has contributed") == after


def test_with_two_stragglers_that_overlap_greedy_switches_once():
    result = run("bsp + greedy@50% >> asp", slow_while([(1, 10, 30), (3, 20, 45)], n=8))
    protocols = [r for r in result.history.of(DecisionMade) if r.kind == "protocol"]
    assert len(protocols) == 4


def test_elastic_excludes_stragglers_and_readmits_them_after_fast_probes():
    result = run("bsp + elastic", slow_while([(1, 10, 30), (2, 10, 50)], n=8), stop="seconds=70")
    assert decided(result, "set_aside", "take_back") == [
        ("set_aside", 1),
        ("set_aside", 2),
        ("take_back", 1),
        ("take_back", 2),
    ]
    by_k = {u.k for u in result.history.of(UpdateMade)}
    assert by_k == {6, 7, 8}
    back_s = {r.worker: r.now_s for r in result.history.of(DecisionMade) if r.kind == "take_back"}
    assert 30 < back_s[1] < 40
    assert 50 < back_s[2] < 60


@pytest.mark.slow
def test_batch_and_learning_rate_follow_the_remaining_workers():
    job = tiny_job(lr_rule="proportional", lr_is="per_worker")
    cluster = slow_while([(1, 10, 200)], n=4)
    result = pl.train(job, protocol="bsp + elastic", cluster=cluster, stop="updates=60")
    rates = {(u.k, u.samples, round(u.learning_rate / 0.1, 9)) for u in result.history.of(UpdateMade)}
    assert rates == {(4, 32, 4.0), (3, 24, 3.0)}


def test_stragglers_are_readmitted_for_the_next_phase():
    result = run("bsp + elastic@25% >> asp", slow_while([(1, 5, 1000)]))
    [back] = [r for r in result.history.of(DecisionMade) if r.kind == "take_back"]
    [_, switch] = [r for r in result.history.of(DecisionMade) if r.kind == "protocol"]
    assert (back.worker, back.reason, back.now_s) == (1, "worker 1: the phase ends", switch.now_s)
    used = [r for r in result.history.of(GradientArrived) if r.worker == 1 and r.used and r.now_s > switch.now_s]
    assert used


@parametrize_few(
    ("n", "factor", "slow", "aside"),
    [
        (4, 1.3, {1}, set()),  # three workers of four bring less than four at 1/1.3
        (4, 5.0, {1, 2}, {1, 2}),  # half of the cluster
        (4, 3.0, {0, 1, 2}, set()),  # one worker brings less than four at a third
        (4, 5.0, {0, 1, 2}, {0, 1, 2}),
        (4, 5.0, {0, 1, 2, 3}, set()),  # all workers
        (2, 5.0, {1}, {1}),
        (2, 1.5, {1}, set()),
    ],
    keep=3,
)
def test_stragglers_are_excluded_if_the_others_are_faster_without_them(n, factor, slow, aside):
    cluster = slow_while([(worker, 10, 1000) for worker in slow], n=n, factor=factor)
    result = run("bsp + elastic", cluster, stop="seconds=80")
    assert {worker for _, worker in decided(result, "set_aside")} == aside


def test_the_policy_of_the_paper_excludes_every_straggler_until_the_switch():
    """Worker 1 recovers; of four workers three deliver less without worker 1 than four with it."""
    cluster = slow_while([(1, 10, 30)], factor=1.3)
    assert decided(run("bsp + elastic(min_gap=0.1)@75% >> asp", cluster), "set_aside", "take_back") == []
    result = run("bsp + elastic(min_gap=0.1, until_switch=true)@75% >> asp", cluster)
    [first, *more] = decided(result, "set_aside", "take_back")
    assert (first, more) == (("set_aside", 1), [("take_back", 1)])
    [back] = [r for r in result.history.of(DecisionMade) if r.kind == "take_back"]
    assert back.reason == "worker 1: the phase ends"
    assert back.now_s > 60
    assert not [r for r in result.history.of(GradientArrived) if r.worker == 1 and 20 < r.now_s < back.now_s]


def test_the_policy_of_the_paper_keeps_the_last_worker():
    cluster = slow_while([(worker, 10 * worker, 1000) for worker in (1, 2, 3)], factor=9)
    result = run("bsp + elastic(until_switch=true)", cluster, stop="updates=120")
    assert min(update.k for update in result.history.of(UpdateMade)) >= 1
    assert result.history.totals.updates == 120


@given(st.dictionaries(st.integers(0, 7), st.floats(0.1, 2.0), min_size=1), st.sets(st.integers(0, 9)))
def test_the_exclusion_with_the_highest_throughput_is_chosen(throughput, stragglers):
    def gradients_per_s(left_out):
        left = [each for worker, each in throughput.items() if worker not in left_out]
        return len(left) * min(left, default=0.0)

    among = [worker for worker in throughput if worker in stragglers]
    best = max(gradients_per_s(each) for size in range(len(among) + 1) for each in combinations(among, size))
    left_out = _best_exclusion(stragglers, throughput)
    assert gradients_per_s(left_out) == best
    assert set(left_out) <= set(among)
    assert set(left_out) < throughput.keys()


def test_a_straggler_is_reported_as_persistent_once():
    for policy in ("stragglers", "greedy", "elastic"):
        result = run(f"bsp + {policy}(persistent_s=20)", slow_while([(3, 5, 1000)], factor=3), stop="seconds=52")
        [persistent] = [r for r in result.history.of(DecisionMade) if r.kind == "persistent"]
        assert persistent.worker == 3
        assert 25 < persistent.now_s < 50


def test_a_straggler_that_has_recovered_by_then_is_not_persistent():
    result = run("bsp + elastic(persistent_s=25)", slow_while([(3, 10, 31)]), stop="seconds=60")
    assert decided(result, "take_back", "persistent") == [("take_back", 3)]
    straggler, back = (
        r for r in result.history.of(DecisionMade) if r.worker == 3 and r.kind in ("straggler", "take_back")
    )
    assert back.now_s - straggler.now_s < 25


def test_a_straggler_that_has_failed_is_not_persistent():
    cluster = slow_while([(1, 0, 1000)], faults=[pl.Fault(worker=1, draw=6)])
    result = run("bsp + elastic(persistent_s=30)", cluster, stop="seconds=100")
    assert decided(result, "set_aside", "persistent") == [("set_aside", 1)]
    assert [lost.worker for lost in result.history.of(WorkerLost)] == [1]


def test_a_straggler_that_fails_and_rejoins_is_a_new_worker():
    cluster = slow_while([(1, 0, 60)], faults=[pl.Fault(worker=1, draw=6, back_after_s=50.0)])
    result = run("bsp + elastic", cluster, stop="seconds=120")
    assert decided(result, "set_aside", "take_back")[0] == ("set_aside", 1)
    assert used_after(result, worker=1, after_s=80)


def used_after(result, worker, after_s):
    return [r for r in result.history.of(GradientArrived) if r.used and r.worker == worker and r.now_s > after_s]


def test_greedy_changes_to_the_asp_of_the_catalogue():
    assert Greedy().to == pl.asp()
    assert repr(Elastic()) == "elastic"


def test_policies_run_in_a_simulation_of_times():
    cluster = slow_while([(1, 10, 60)], n=8)
    watched = pl.simulate("bsp + elastic", cluster, updates=60)
    assert watched.time_s < pl.simulate("bsp", cluster, updates=60).time_s
