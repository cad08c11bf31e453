"""A fleet, simulated in arrays over its workers, against the coordinator with the timing engine, to the last bit."""

from collections import Counter
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from catalogue_table import TABLE
from paceline.catalogue.parser import parse_plan
from paceline.clusters.timing.trace import TraceRow
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.failure_detector import FailureDetector
from paceline.core.events import Apply, Compute, Decision
from paceline.engines.virtual.timing import TimedWorkers
from paceline.engines.virtual.vectorized import renewal
from paceline.engines.virtual.vectorized.lockstep import Lockstep
from paceline.engines.virtual.vectorized.renewal import Renewal
from paceline.engines.virtual.vectorized.rounds import Rounds
from paceline.engines.virtual.vectorized.sampling import RoundTripSampler, event_order
from paceline.engines.virtual.vectorized.selection import is_exact, vectorized_simulation
from paceline.engines.virtual.vectorized.shares import SharedRounds
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import Protocol, as_plan
from paceline.run.simulate import _simulate_by_events
from selections import parametrize_each_once, parametrize_few

DISTRIBUTIONS = [
    pl.timing.Deterministic(1.0),
    pl.timing.Empirical((1.0, 2.0, 3.0)),
    pl.timing.Exponential(1.0),
    pl.timing.ShiftedExponential(0.3, 0.7),
    pl.timing.Uniform(0.5, 1.0),
    pl.timing.Pareto(1.0, 2.5),
    pl.timing.LogNormal(1.0, 0.5),
    pl.timing.Gamma(2.0, 1.0),
    pl.timing.HyperExponential((1.0, 5.0), (0.9, 0.1)),
]


@dataclass
class Seen:
    updates: list  # the time of each, and the staleness of its gradients
    now: float
    totals: dict
    idle_share: float
    wasted_s: float
    pulls: int
    pushes: int


def by_events(protocol, cluster, updates, seed=0, payload_bytes=0):
    plan = checked_plan(as_plan(protocol), cluster.n, total=None, per_epoch=None)
    engine = TimedWorkers(cluster, seed, payload_bytes)
    made, given = [], Counter()

    def observe(now, event, commands):
        for command in commands:
            given[type(command)] += 1
            if isinstance(command, Apply):
                made.append((now, [gradient.staleness for gradient in command.gradients]))
            assert not (isinstance(command, Decision) and command.kind == "lost")

    engine.loop().run(Coordinator(plan, workers=cluster.n, stop=pl.Stop(updates=updates)), observe)
    assert engine.pulls == given[Compute]
    return seen(made, engine)


def by_fleet(kind, protocol, cluster, updates, seed=0, payload_bytes=0):
    """Return the same of a fleet."""
    fleet, made = kind(protocol, cluster, seed, payload_bytes), []
    fleet.run(updates, lambda now, staleness: made.append((now, staleness.tolist())))
    return seen(made, fleet.accounting)


def seen(made, counts):
    totals = vars(counts.totals())
    idle_share = pytest.approx(totals.pop("idle_share"), abs=1e-9)
    wasted_s = pytest.approx(counts.wasted_s, rel=1e-9, abs=1e-9 * counts.now)
    return Seen(made, counts.now, totals, idle_share, wasted_s, counts.pulls, counts.pushes)


def by_times(protocol):
    [phase] = as_plan(protocol).phases
    return all(controller.reads == "times" for controller in phase.controllers)


def kinds_for(protocol, cluster):
    """Return every way of simulating that is exact here: any protocol may be taken an update at a time."""
    return [kind for kind in (Rounds, Lockstep, Renewal) if kind is Rounds or kind.takes(protocol, cluster)]


@st.composite
def protocols(draw, n):
    refill = draw(st.sampled_from(["update", "arrival"]))
    quorum = draw(st.just("all") | st.integers(1, n if refill == "update" else 2 * n + 2))
    max_staleness = draw(st.sampled_from([0, 1, 2, 5, inf]))
    on_update = draw(st.sampled_from(["finish", "interrupt"])) if max_staleness < inf else "finish"
    return Protocol(quorum=quorum, max_staleness=max_staleness, refill=refill, on_update=on_update, name="drawn")


@st.composite
def clusters(draw):
    n = draw(st.sampled_from([1, 2, 3, 5, 8, 66]))
    law, speed = st.sampled_from(DISTRIBUTIONS), st.sampled_from([1.0, 2, 0.5, 4.0])
    network = draw(
        st.sampled_from(
            [
                pl.timing.Network(),
                pl.timing.Network(latency_s=0.25),
                pl.timing.Network(latency_s=0.1, up_bytes_per_s=7.0, down_bytes_per_s=13.0),
            ]
        )
    )
    return pl.Cluster(
        n,
        draw(law | st.lists(law, min_size=n, max_size=n)),
        speed=draw(speed | st.lists(speed, min_size=n, max_size=n)),
        network=network,
        server=pl.timing.ServerTime(update_s=draw(st.sampled_from([0.0, 0.0, 0.25, 1.0]))),
        leases=pl.timing.LeaseTime(cost_s=draw(st.sampled_from([0.0, 0.0, 0.3]))),
    )


def a_fleet_does_what_the_coordinator_does(data):
    cluster = data.draw(clusters())
    protocol = data.draw(protocols(cluster.n))
    updates, seed, payload_bytes = (data.draw(st.integers(low, high)) for low, high in ((1, 40), (0, 9), (0, 1)))
    args = (protocol, cluster, updates, seed, payload_bytes)
    expected = by_events(*args)
    for kind in kinds_for(protocol, cluster):
        assert by_fleet(kind, *args) == expected


@settings(max_examples=40)
@given(data=st.data())
def test_the_vectorized_simulation_equals_the_coordinator(data):
    a_fleet_does_what_the_coordinator_does(data)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=5_000)
@given(data=st.data())
def test_the_vectorized_simulation_equals_the_coordinator_in_many_cases(data):
    a_fleet_does_what_the_coordinator_does(data)


@parametrize_each_once(max_staleness=[0, 2], refill=["update", "arrival"])
def test_workers_interrupted_at_the_same_time_restart_in_task_order(refill, max_staleness):
    cluster = pl.Cluster(12, pl.timing.Empirical((1.0, 2.0, 3.0)), speed=[1.0, 2.0, 4.0] * 4)
    protocol = Protocol(quorum=5, max_staleness=max_staleness, refill=refill, on_update="interrupt", name="drawn")
    for seed in range(5):
        assert by_fleet(Rounds, protocol, cluster, 50, seed) == by_events(protocol, cluster, 50, seed)


def comparable(simulated):
    return replace(
        simulated,
        totals=replace(simulated.totals, idle_share=pytest.approx(simulated.totals.idle_share, abs=1e-9)),
        wasted_s=pytest.approx(simulated.wasted_s, rel=1e-9, abs=1e-9 * simulated.time_s),
    )


def event_by_event(protocol, cluster, updates, payload_bytes=0, failure_detector=None):
    plan = checked_plan(as_plan(protocol), cluster.n, total=None, per_epoch=None)
    return _simulate_by_events(plan, cluster, pl.Stop(updates=updates), 0, payload_bytes, failure_detector)


@parametrize_few("law", [pl.timing.Deterministic(1.0), pl.timing.Exponential(1.0)], keep=1, ids=repr)
@parametrize_few("protocol", [protocol for _, protocol, _ in TABLE if by_times(protocol)], ids=str, keep=5)
def test_simulate_gives_the_same_result_for_every_protocol_of_the_catalogue(protocol, law):
    cluster = pl.Cluster(70, law)
    found = pl.simulate(protocol, cluster, updates=70, payload_bytes=8)
    assert found == comparable(event_by_event(protocol, cluster, 70, payload_bytes=8))


# -- the parts


@pytest.mark.parametrize("law", DISTRIBUTIONS, ids=repr)
def test_times_equal_the_round_trips_in_any_order(law):
    rng = np.random.default_rng(0)
    cluster = pl.Cluster(70, law, speed=[1 + i % 3 for i in range(70)], network=pl.timing.Network(latency_s=0.1))
    draws, trips = RoundTripSampler(cluster, 3, 8), cluster.round_trips(3, 8)
    for _ in range(3):
        workers = rng.permutation(70)[:50]
        chosen = rng.integers(0, 200, 50)
        expected = [
            trips.duration_s(int(worker), int(draw) + 1, 0.0) for worker, draw in zip(workers, chosen, strict=True)
        ]
        assert draws.durations_s(workers, chosen).tolist() == expected
    block_s = draws.block_s(1)
    assert [block_s[d, w] for d in (0, 63) for w in (0, 69)] == [
        trips.duration_s(w, 64 + d + 1, 0.0) for d in (0, 63) for w in (0, 69)
    ]


@given(data=st.data(), durations=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=6))
def test_simultaneous_arrivals_are_in_task_order(data, durations):
    first = data.draw(st.permutations(range(len(durations))))  # in which the workers were given their first work
    heap = [(durations[w][0], place, w, 0) for place, w in enumerate(first)]
    heapify(heap)
    expected, sequence = [], len(heap)
    while heap:
        now, _, worker, draw = heappop(heap)
        expected.append((worker, draw))
        if draw + 1 < len(durations[worker]):
            sequence += 1
            heappush(heap, (now + durations[worker][draw + 1], sequence, worker, draw + 1))
    events = data.draw(st.permutations(expected))
    times_s = np.array([float(sum(durations[worker][: draw + 1])) for worker, draw in events])
    parents = np.array([events.index((worker, draw - 1)) if draw else -1 for worker, draw in events])
    given = np.array([first.index(worker) for worker, _ in events])
    order = event_order(np.arange(len(events)), times_s, parents, given)
    assert [events[i] for i in order] == expected


@pytest.mark.parametrize("speed", [1.0, [1.0, 90.0, 1.0, 7.0]], ids=["alike", "not alike"])
@pytest.mark.parametrize("law", [pl.timing.Deterministic(1.0), pl.timing.Exponential(1.0)], ids=repr)
def test_arrivals_do_not_depend_on_the_block_length(law, speed, monkeypatch):
    cluster = pl.Cluster(4, law, speed=speed)
    expected = by_events(pl.k_batch_async(k=3), cluster, 200)
    for arrivals in (1, 10, 1000):  # and a burst of one worker is cut short
        monkeypatch.setattr(renewal, "ARRIVALS", arrivals)
        assert by_fleet(Renewal, pl.k_batch_async(k=3), cluster, 200) == expected


@parametrize_few("protocol", [pl.bsp(), pl.k_sync(k=2), pl.backup(k=2), pl.k_async(k=2), pl.asp()], ids=repr, keep=2)
def test_a_long_run_uses_many_draws(protocol):
    cluster = pl.Cluster(3, pl.timing.Exponential(1.0))
    for kind in kinds_for(protocol, cluster):
        assert by_fleet(kind, protocol, cluster, 200) == by_events(protocol, cluster, 200)


@parametrize_few("seed", range(3), keep=1)
def test_many_quick_arrivals_after_a_long_pause_are_processed_in_blocks(seed, monkeypatch):
    monkeypatch.setattr(renewal, "ARRIVALS", 50)
    law = pl.timing.Empirical((1e-3,) * 600 + (9.0,))
    args = (pl.asp(), pl.Cluster(3, law), 5_000, seed)
    assert by_fleet(Renewal, *args) == by_events(*args)


# -- who is silent for long


SLOW_ONE = pl.Cluster(40, pl.timing.Deterministic(1.0), speed=[0.03] + [1.0] * 39)  # 33 s


@parametrize_few("protocol", [pl.bsp(), pl.backup(k=39), pl.k_batch_async(k=40), pl.k_async(k=39)], ids=repr, keep=2)
@pytest.mark.parametrize("cluster", [SLOW_ONE, pl.Cluster(200, pl.timing.Pareto(1.0, 1.1))], ids=["slow", "heavy"])
def test_a_slow_worker_is_never_lost(protocol, cluster):
    if cluster is not SLOW_ONE and protocol.name != "bsp":
        protocol = pl.k_batch_async(k=cluster.n)
    expected = by_events(protocol, cluster, 40)
    for kind in kinds_for(protocol, cluster):
        assert by_fleet(kind, protocol, cluster, 40) == expected


@parametrize_few("protocol", [pl.bsp(), pl.backup(k=39), pl.k_batch_async(k=40)], ids=repr, keep=1)
def test_a_given_timeout_selects_the_coordinator(protocol):
    expected = event_by_event(protocol, SLOW_ONE, 40, failure_detector=FailureDetector(20.0))
    assert pl.simulate(protocol, SLOW_ONE, updates=40, worker_timeout_s=20.0) == comparable(expected)
    assert expected.totals != event_by_event(protocol, SLOW_ONE, 40).totals
    with pytest.raises(pl.UsageError, match="worker_timeout_s=0, expected seconds > 0"):
        pl.simulate(protocol, SLOW_ONE, updates=40, worker_timeout_s=0)


# -- what is left to the coordinator


TRACE = pl.timing.Trace(
    [
        TraceRow(worker=worker, draw=1, start_s=0.0, pull_s=0.0, compute_s=1.0, push_s=0.0, end_s=1.0, censored=0)
        for worker in range(100)
    ]
)


@pytest.mark.parametrize(
    "knobs",
    [
        {"slowdowns": [pl.timing.Slowdown(at_s=1.0, factor=2.0, workers=0.5)]},
        {"slowdowns": [pl.timing.Periodic(on_s=1.0, every_s=2.0, slowdown=2.0)]},
        {"transient": pl.timing.Transient(mean_on_s=1.0, mean_off_s=1.0, slowdown=2.0)},
        {"faults": [pl.Fault(worker=0, draw=1)]},
        {"server": pl.timing.ServerTime(gradient_s=0.1)},
        {"timing": TRACE},
    ],
    ids=str,
)
def test_a_cluster_may_require_the_coordinator(knobs):
    assert not is_exact(as_plan(pl.bsp()), pl.Cluster(100, **knobs))


@pytest.mark.parametrize("plan", ["ssp(lead=2)", "b_dbw", "bsp@updates=9 >> asp"])
def test_a_plan_may_require_the_coordinator(plan):
    assert not is_exact(parse_plan(plan), pl.Cluster(100))


@pytest.mark.parametrize(
    ("protocol", "n", "kind"),
    [
        (pl.bsp(), 2, Lockstep),
        (pl.k_sync(k=1), 1000, Lockstep),
        (pl.asp(), 100, Renewal),
        (pl.asp(), 4, None),
        (pl.backup(k=50), 100, Rounds),
        (pl.k_batch_sync(k=1), 100, Rounds),
        (pl.k_async(k=1), 1000, None),  # a window looks at all workers, an event at one
        (pl.ringmaster(r=10), 1000, None),
    ],
)
def test_the_vectorized_simulation_is_chosen_if_it_is_faster(protocol, n, kind):
    chosen = vectorized_simulation(as_plan(protocol), pl.Cluster(n))
    assert type(chosen) is (kind or type(None))


@pytest.mark.parametrize("protocol", ["bsp", "asp", "backup(k=50)", "ssp(lead=1)"])
def test_a_negative_payload_is_refused(protocol):
    with pytest.raises(pl.UsageError, match="payload_bytes"):
        pl.simulate(protocol, pl.Cluster(100), updates=1, payload_bytes=-1)


# -- what is reported


FOUR = pl.Cluster(4, [pl.timing.Deterministic(seconds) for seconds in (1.0, 2.0, 4.0, 5.0)])


@pytest.mark.parametrize(
    ("protocol", "idle_s", "wasted_s", "pulls", "pushes"),
    [
        (pl.bsp(), 2 * (4 + 3 + 1), 0.0, 8, 8),
        (pl.k_sync(k=2), 2 * 1.0, 2 + 2, 8, 4),  # what goes on at the end is not wasted yet
        (pl.backup(k=2), 2 * 1.0, 4.0, 4 + 2 + 1, 5),  # the third worker, at 4 s before the second one
        (pl.pull(k=3), 0.0, 2 + 4 + 5, 4 + 3 + 5, 9),  # all but the first worker, after the update at 2 s
        (pl.asp(), 0.0, 0.0, 5, 2),
    ],
    ids=repr,
)
def test_idle_and_wasted_seconds_and_traffic(protocol, idle_s, wasted_s, pulls, pushes):
    for kind in kinds_for(protocol, FOUR):
        fleet = kind(protocol, FOUR, 0)
        fleet.run(2)
        found = fleet.accounting
        assert (found.idle_s, found.wasted_s, found.pulls, found.pushes) == (idle_s, wasted_s, pulls, pushes)
    found = event_by_event(protocol, FOUR, 2)
    assert (found.idle_s, found.wasted_s, found.pulls, found.pushes) == (pytest.approx(idle_s), wasted_s, pulls, pushes)


def test_utilization_of_server_and_link():
    cluster = pl.Cluster(10, pl.timing.Deterministic(1.0), server=pl.timing.ServerTime(update_s=0.25))
    found = pl.simulate("backup(k=5)", cluster, updates=4, payload_bytes=100)
    assert (found.time_s, found.pulls, found.pushes) == (4 * 1.25, 40, 35)
    assert found.server_busy() == 4 * 0.25 / 5
    assert found.server_busy(pl.timing.ServerTime(update_s=1.0, gradient_s=0.1)) == pytest.approx((4 + 3.5) / 5)
    assert found.link_busy(bytes_per_s=100) == 40 / 5
    with pytest.raises(pl.UsageError, match="bytes_per_s"):
        found.link_busy(bytes_per_s=0)


@pytest.mark.slow
@settings(max_examples=15)
@given(clusters(), st.integers(1, 12), st.sampled_from([1.0, 1.5, 2.5]), st.integers(0, 3))
def test_shares_that_follow_speeds_are_those_of_the_coordinator(cluster, pieces, max_share, seed):
    protocol = pl.balanced(m=pieces, leases=1, max_share=max_share)
    [balance] = protocol.controllers
    made, rounds = [], SharedRounds(balance, cluster, seed, 2.0)
    rounds.run(40, lambda now, staleness: made.append((now, staleness.tolist())))
    assert seen(made, rounds.accounting) == by_events(protocol, cluster, 40, seed, 2.0)
