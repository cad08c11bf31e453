"""Grace period: when updates are made, on workers whose times are known."""

import pytest

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.coordinator.coordinator import Coordinator
from paceline.core import events
from paceline.core.stop import Stop
from paceline.engines.virtual.timing import TimedWorkers
from paceline.errors import UsageError
from paceline.protocols.plan_checks import checked_plan
from tiny_jobs import tiny_job


def updates_of(plan, seconds, **more):
    """Return (seconds since the update before, gradients, reason) of each update of workers with these times."""
    cluster = pl.Cluster(len(seconds), pl.timing.Deterministic(1.0), speed=[1 / each for each in seconds], **more)
    times, found = [0.0], []
    engine = TimedWorkers(cluster, seed=0)

    def observe(now, event, commands):
        for each in commands:
            if isinstance(each, events.Apply):
                found.append((pytest.approx(engine.now - times[-1]), len(each.gradients), each.reason))
                times.append(engine.now)

    with engine.loop() as loop:
        loop.run(Coordinator(parse_plan(plan), workers=cluster.n, stop=Stop(updates=5)), observe)
    return found


def test_an_update_waits_for_gradients_within_the_grace_period():
    found = updates_of("k_sync(k=3) + grace(seconds=0.5)", [1, 1.1, 1.2, 1.6, 3])
    assert found == [(1.7, 4, "0.5 s after the quorum of 3")] * 5


def test_an_update_is_made_as_soon_as_every_worker_has_contributed():
    found = updates_of("k_sync(k=2) + grace(seconds=0.5)", [1, 1.1, 1.2])
    assert found == [(1.2, 3, "every live worker has contributed")] * 5


def test_the_grace_period_begins_with_the_quorum_of_each_update():
    found = updates_of("k_sync(k=1) + grace(seconds=0.1)", [1, 1.05, 1.15])
    assert found == [(1.1, 2, "0.1 s after the quorum of 1")] * 5


def test_a_grace_period_ends_with_its_update():
    found = updates_of(
        "k_sync(k=2) + grace(seconds=1.15)", [1, 1.1, 1.2]
    )  # each would end after the next first gradient
    assert found == [(1.2, 3, "every live worker has contributed")] * 5


def test_a_controller_that_sets_the_quorum_is_refused():
    for phase in (
        pl.k_sync(k=2).controlled_by(pl.controllers.FixedQuorum(k=2)) + pl.grace(seconds=5),
        pl.k_sync(k=2) + pl.grace(seconds=5) + pl.controllers.FixedQuorum(k=2),
    ):
        with pytest.raises(UsageError, match=r"grace\(seconds=5\) waits after a fixed quorum, but another controller"):
            pl.train(tiny_job(), protocol=phase, cluster="4*exp(mean=1)", stop="updates=3")


def test_fewer_live_workers_than_the_quorum_make_the_update_without_a_grace_period():
    found = updates_of("k_sync(k=3) + grace(seconds=9)", [1, 1.1, 1.2], faults=[pl.Fault(worker=2, draw=2, kind="die")])
    assert found[0][:2] == (1.2, 3)
    assert found[2:] == [(1.1, 2, "every live worker has contributed")] * 3


def test_stale_gradients_are_waited_for_too():
    assert [k for _, k, _ in updates_of("k_batch_async(k=2) + grace(seconds=0.5)", [1, 1.1, 1.4])] == [3, 2, 3, 3, 3]


@pytest.mark.slow
def test_a_resumed_run_waits_as_before(tmp_path):
    common = {"protocol": "k_sync(k=2) + grace(seconds=0.3)", "cluster": "4*exp(mean=1)", "seed": 1}
    whole = pl.train(tiny_job(), stop="updates=20", **common)
    pl.train(tiny_job(), stop="updates=9", out=tmp_path / "run", checkpoint_every="updates=3", **common)
    parts = pl.train(tiny_job(), stop="updates=20", resume=tmp_path / "run", **common)
    made = [[(each.now_s, each.k) for each in run.history.of(pl.callbacks.UpdateMade)] for run in (whole, parts)]
    assert made[0] == made[1]
    assert {k for _, k in made[0]} == {2, 3, 4}


@pytest.mark.parametrize("protocol", ["bsp", "dbw", "ssp(lead=2)", "all_reduce", "k_sync(k=2) + grace(seconds=1)"])
def test_a_protocol_without_a_fixed_quorum_is_refused(protocol):
    with pytest.raises(UsageError, match=r"has no quorum of k gradients .* type for example k_sync\(k=6\) \+ grace"):
        parse_plan(f"{protocol} + grace(seconds=1)")


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("k_sync(k=2) + grace", "type grace(seconds=...)"),
        ("k_sync(k=2) + grace(seconds=0)", "seconds=0 is not a number in (0, inf)"),
        ("k_sync(k=2) + grace(seconds=inf)", "seconds=inf is not a number in (0, inf)"),
        ("k_sync(k=9) + grace(seconds=1)", "give k <= 4"),
    ],
)
def test_bad_grace_periods_are_refused(plan, says):
    with pytest.raises(UsageError) as raised:
        checked_plan(parse_plan(plan), 4, 100, 10)
    assert says in str(raised.value)


def test_it_is_typed_as_it_is_shown():
    plan = parse_plan("k_sync(k=3) + grace(seconds=0.5)")
    assert str(plan) == "k_sync(k=3) + grace(seconds=0.5)"
    assert plan == parse_plan(str(plan))
