"""Simulated seconds against closed forms. H_n is the n-th harmonic number."""

import pytest

import paceline as pl
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.failure_detector import FailureDetector
from paceline.core.events import Apply, Drop, Joined, Lost
from paceline.engines.virtual.timing import TimedWorkers
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import as_plan
from selections import parametrize_few
from tiny_jobs import tiny_job

P, K = 8, 4
UNIT_EXPONENTIAL = pl.timing.Exponential(1.0)


def harmonic(n):
    return sum(1 / i for i in range(1, n + 1))


def seconds_per_update(protocol, cluster, updates, **knobs):
    return pl.simulate(protocol, cluster, updates=updates, **knobs).seconds_per_update


# -- exponential times: the lemmas of Dutta et al. 2018, Sect. 3

THEORY = [
    (pl.bsp(), harmonic(P)),
    (pl.k_sync(K), harmonic(P) - harmonic(P - K)),
    (pl.k_async(K), harmonic(P) - harmonic(P - K)),
    (pl.k_batch_sync(K), K / P),
    (pl.k_batch_async(K), K / P),
    (pl.asp(), 1 / P),
]


@parametrize_few(("protocol", "expected_s"), THEORY, keep=1, ids=repr)
def test_seconds_per_update_with_exponential_times(protocol, expected_s):
    found_s = seconds_per_update(protocol, pl.Cluster(P, UNIT_EXPONENTIAL), updates=10_000)
    assert found_s == pytest.approx(expected_s, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "expected_s"), THEORY, ids=repr)
def test_seconds_per_update_with_exponential_times_in_a_long_run(protocol, expected_s):
    found_s = seconds_per_update(protocol, pl.Cluster(P, UNIT_EXPONENTIAL), updates=100_000)
    assert found_s == pytest.approx(expected_s, rel=0.01)


@pytest.mark.parametrize("n", [2, 8])
def test_the_idle_share_of_bsp(n):
    # A worker computes for a mean of 1 out of every H_n seconds.
    simulated = pl.simulate(pl.bsp(), pl.Cluster(n, UNIT_EXPONENTIAL), updates=5_000)
    assert simulated.totals.idle_share == pytest.approx(1 - 1 / harmonic(n), rel=0.02)


# A worker's versions go up by staleness + 1 from one of its gradients to the next, where it waits for the update
# that its gradient enters (or causes); and by P / K on average, as it brings one of P gradients, K an update. On
# arrival only every K-th gradient causes an update: staleness + 1 / K on average. Both hold for any law of times.
@parametrize_few("law", [UNIT_EXPONENTIAL, pl.timing.Uniform(0.5, 3.0)], keep=1, ids=repr)
@parametrize_few(
    ("protocol", "expected"),
    [(pl.asp(), P - 1), (pl.k_async(K), P / K - 1), (pl.k_async(3), P / 3 - 1), (pl.k_batch_async(K), (P - 1) / K)],
    ids=repr,
    keep=1,
)
def test_the_mean_staleness(protocol, expected, law):
    simulated = pl.simulate(protocol, pl.Cluster(P, law), updates=5_000)
    assert simulated.totals.mean_staleness == pytest.approx(expected, rel=0.01)


# -- constant times

FOUR_SPEEDS = pl.Cluster(4, [pl.timing.Deterministic(seconds) for seconds in (1.0, 2.0, 4.0, 5.0)])


@pytest.mark.parametrize(
    ("protocol", "cluster", "updates", "expected_s"),
    [
        (pl.bsp(), FOUR_SPEEDS, 100, 500.0),
        (pl.k_sync(3), FOUR_SPEEDS, 100, 400.0),
        (pl.backup(1), FOUR_SPEEDS, 100, 100.0),
        (pl.k_batch_sync(6), pl.Cluster(2, pl.timing.Deterministic(1.0)), 100, 300.0),
        (pl.asp(), FOUR_SPEEDS, 20 + 10 + 5 + 4, 20.0),
        (pl.ssp(lead=0), FOUR_SPEEDS, 4 * 10, 50.0),  # in lockstep with the slowest
        (pl.asp(), pl.Cluster(4, pl.timing.Deterministic(1.0), speed=[1.0, 2.0, 4.0, 0.5]), 2 * (1 + 2 + 4) + 1, 2.0),
    ],
)
def test_virtual_time_with_constant_times(protocol, cluster, updates, expected_s):
    assert pl.simulate(protocol, cluster, updates=updates).time_s == pytest.approx(expected_s, rel=1e-12)


# -- network and server


def test_the_network_costs_a_pull_and_a_push_per_round_trip():
    network = pl.timing.Network(latency_s=0.5, up_bytes_per_s=50, down_bytes_per_s=100)
    cluster = pl.Cluster(3, pl.timing.Deterministic(1.0), network=network)
    found_s = seconds_per_update(pl.bsp(), cluster, updates=10, payload_bytes=100)
    assert found_s == pytest.approx((0.5 + 1) + 1 + (0.5 + 2))


@parametrize_few(
    ("protocol", "expected_s"),
    [
        (pl.bsp(), 1 + 4 * 0.1 + 0.05),  # four arrive at once and are received one after the other
        (pl.k_sync(2), 1 + 2 * 0.1 + 0.05),
        (pl.asp(), (1 + 0.1 + 0.05) / 4),  # the server is busy for 0.6 s of the 1.15 s of a round trip
    ],
    ids=repr,
    keep=1,
)
def test_the_server_receives_gradients_one_by_one_and_makes_updates(protocol, expected_s):
    cluster = pl.Cluster(4, pl.timing.Deterministic(1.0), server=pl.timing.ServerTime(update_s=0.05, gradient_s=0.1))
    assert seconds_per_update(protocol, cluster, updates=2_000) == pytest.approx(expected_s, rel=1e-3)


def test_a_busy_server_limits_the_throughput():
    cluster = pl.Cluster(4, pl.timing.Deterministic(1.0), server=pl.timing.ServerTime(update_s=0.5, gradient_s=0.5))
    assert seconds_per_update(pl.asp(), cluster, updates=2_000) == pytest.approx(1.0, rel=1e-3)


def test_a_checkpoint_from_before_local_steps_is_loaded():
    engine, again = (TimedWorkers(pl.Cluster(2, pl.timing.Deterministic(1.0)), seed=0) for _ in range(2))
    engine.loop().run(Coordinator(as_plan(pl.bsp()), workers=2, stop=pl.Stop(updates=3)))
    state = engine.state_dict()
    del state["steps"]
    again.load_state_dict(state)
    assert (again.now, again.state_dict()["steps"]) == (engine.now, {})


# -- failures by script


def simulated_with(*faults, updates, n=2, protocol=None, **knobs):
    """Return the engine, its events but arrivals, its drops, and (seconds, gradients) of each update."""
    plan = checked_plan(as_plan(protocol or pl.bsp()), n, total=None, per_epoch=None)
    coordinator = Coordinator(plan, workers=n, stop=pl.Stop(updates=updates), **knobs)
    engine = TimedWorkers(pl.Cluster(n, pl.timing.Deterministic(1.0), faults=faults), seed=0)
    events, drops, made = [], [], []

    def observe(now, event, commands):
        if isinstance(event, Lost | Joined):
            events.append((now, type(event), event.worker))
        drops.extend((now, command.worker, command.reason) for command in commands if isinstance(command, Drop))
        made.extend((now, len(command.gradients)) for command in commands if isinstance(command, Apply))

    engine.end = engine.loop().run(coordinator, observe)
    return engine, events, drops, made


@pytest.mark.parametrize("kind", ["die", "raise"])
def test_a_worker_that_fails_is_lost(kind):
    fault = pl.Fault(worker=1, draw=2, kind=kind)
    engine, events, _, made = simulated_with(fault, updates=4)
    assert engine.fired == [fault]
    assert events == [(2.0, Lost, 1)]
    assert made == [(1.0, 2), (2.0, 1), (3.0, 1), (4.0, 1)]


def test_a_worker_that_returns_joins():
    fault = pl.Fault(worker=1, draw=2, back_after_s=3.5)
    engine, events, drops, made = simulated_with(fault, updates=7)
    assert engine.fired == [fault]
    assert events == [(2.0, Lost, 1), (5.5, Joined, 1)]
    assert drops == []  # what it had begun at 5.5 was interrupted at 6, with the update
    assert made == [(1.0, 2), (2.0, 1), (3.0, 1), (4.0, 1), (5.0, 1), (6.0, 1), (7.0, 2)]


def test_a_worker_that_hangs_is_lost_after_the_timeout():
    fault = pl.Fault(worker=1, draw=1, kind="hang")
    engine, events, _, made = simulated_with(fault, updates=2, failure_detector=FailureDetector(10.0))
    assert engine.fired == [fault]
    assert events == []
    assert made == [(10.0, 1), (11.0, 1)]


def test_without_a_timeout_a_worker_that_hangs_is_lost_when_no_other_one_computes():
    faults = pl.Fault(worker=1, draw=2, kind="hang"), pl.Fault(worker=2, draw=1, kind="hang")
    engine, events, _, made = simulated_with(*faults, updates=4, n=3)
    assert engine.fired == [faults[1], faults[0]]
    assert events == [(1.0, Lost, 2), (2.0, Lost, 1)]
    assert made == [(1.0, 2), (2.0, 1), (3.0, 1), (4.0, 1)]


def test_without_a_timeout_a_worker_that_hangs_is_not_lost_while_others_compute():
    engine, events, _, made = simulated_with(pl.Fault(worker=1, draw=2, kind="hang"), updates=9, protocol=pl.asp())
    assert (events, len(engine.fired), made[-1]) == ([], 1, (8.0, 1))


def test_the_run_ends_with_a_reason_when_every_worker_hangs():
    faults = [pl.Fault(worker=worker, draw=2, kind="hang") for worker in range(2)]
    engine, events, _, made = simulated_with(*faults, updates=9)
    assert (events, made) == ([(2.0, Lost, 0), (2.0, Lost, 1)], [(1.0, 2)])
    assert engine.end.outcome is pl.results.Outcome.NO_WORKERS


@parametrize_few("protocol", ["bsp", "k_batch_sync(k=3)", "asp", "all_reduce", "dc_s3gd"], keep=2)
@parametrize_few("stop", ["updates=30", "seconds=30"], keep=1)
def test_a_run_continues_when_a_worker_hangs(protocol, stop, tmp_path):
    cluster = pl.Cluster(
        4,
        pl.timing.Exponential(1.0),
        faults=[pl.Fault(worker=2, draw=3, kind="hang"), pl.Fault(worker=0, draw=5, kind="hang")],
    )
    run = pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop=stop, out=tmp_path / "run")
    assert run.stopped_by == stop.partition("=")[0]
    assert run.history.totals.updates >= 5
    assert pl.replay(tmp_path / "run").difference == ""


def test_a_gradient_that_is_not_finite_is_computed_again():
    fault = pl.Fault(worker=0, draw=1, kind="not_finite")
    engine, _, drops, made = simulated_with(fault, updates=2)
    assert engine.fired == [fault]
    assert drops == [(1.0, 0, "not finite")]
    assert made == [(2.0, 2), (3.0, 2)]


def test_a_run_without_workers_ends():
    engine, _, _, made = simulated_with(pl.Fault(worker=0, draw=2), pl.Fault(worker=1, draw=2), updates=5)
    assert engine.end.outcome is pl.results.Outcome.NO_WORKERS
    assert made == [(1.0, 2)]
    assert len(engine.fired) == 2


def test_a_gradient_that_is_not_finite_counts_as_dropped():
    fault = pl.Fault(worker=0, draw=1, kind="not_finite")
    simulated = pl.simulate("bsp", pl.Cluster(2, timing=pl.timing.Deterministic(1.0), faults=[fault]), updates=3)
    assert (simulated.totals.used, simulated.totals.dropped) == (6, 1)


def test_a_worker_that_hangs_is_busy_until_the_end():
    # The other one makes 3 updates of its own after the timeout: 1 s of work, 9 s of waiting, 2 s of work.
    fault = pl.Fault(worker=1, draw=1, kind="hang")
    cluster = pl.Cluster(2, timing=pl.timing.Deterministic(1.0), faults=[fault])
    simulated = pl.simulate("bsp", cluster, updates=3, worker_timeout_s=10.0)
    assert simulated.time_s == 12.0
    worked_s = 3 + simulated.time_s
    assert simulated.totals.idle_share == pytest.approx(1 - worked_s / (2 * simulated.time_s))
