"""`auto` under balanced updates: what leases tell of round trips, and which plans have a queue."""

import pytest

import paceline as pl
from arrivals import arrival
from auto_run import AutoRun, N
from paceline.catalogue.parser import parse_plan
from paceline.catalogue.protocols import bsp
from paceline.core.records import DecisionMade, UpdateMade, WorkInterrupted
from paceline.policies.controllers.auto import Auto, with_whole_minibatches
from paceline.policies.controllers.auto_candidates import balanced
from paceline.policies.controllers.balance import Balance, balances_of
from paceline.policies.controllers.base import ChangeProtocol
from tiny_jobs import tiny_job


def work_in_leases(run, rounds, trips_s, stretch):
    """Let workers compute an update in two leases each, whose samples follow their speeds."""
    for _ in range(rounds):
        whole_s = N / sum(1 / each for each in trips_s)
        for worker, trip_s in enumerate(trips_s):
            share = whole_s / trip_s
            for part in (0.75, 0.25):
                run.ask(
                    "arrival",
                    arrival=arrival(0.0, worker, 1, loss=1.0),
                    trip_s=part * whole_s,
                    accepted=True,
                    share=part * share,
                )
        run.workload += N
        run.version += 1
        run.now += stretch * whole_s
        run.ask("open")


def test_leases_tell_the_round_trips_of_whole_minibatches_and_how_long_an_update_takes():
    run, trips_s = AutoRun(Auto(m=8), phi=1000.0), [1.0, 1.0, 1.0, 8.0]
    work_in_leases(run, 40, trips_s, stretch=1.02)
    assert run.protocol.name == "balanced(m=8)"  # uses every sample, at the rate of asp, and nothing is stale
    scores = {protocol.name: score for protocol, score in run.state.scored.items()}
    per_s = sum(1 / each for each in trips_s)
    assert scores["balanced(m=8)"].gradients_per_s == pytest.approx(per_s / 1.02, rel=0.02)
    assert scores["bsp"].gradients_per_s == pytest.approx(N / 8.0, rel=0.02)
    assert scores["asp"].gradients_per_s == pytest.approx(per_s, rel=0.05)
    run.phi = 0.01
    work_in_leases(run, 40, trips_s, stretch=1.02)
    assert run.protocol.name == "k_sync(k=3)", "few gradients are enough"


def test_a_queue_that_is_used_badly_is_left():
    run = AutoRun(Auto(candidates=(balanced(8), bsp()), m=8), phi=1000.0)
    work_in_leases(run, 40, [1.0, 1.0, 1.0, 1.0], stretch=3.0)
    assert run.protocol == bsp()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto(candidates=['bsp'], m=8)", r"m=8 with candidates; name balanced\(m=8\) among the candidates"),
        ("auto(candidates=['balanced(m=8)', 'balanced(m=4)'])", "a run has one queue of leases"),
        ("auto(candidates=['balanced(m=8, leases=1)'])", "is no protocol with constant knobs; give for example"),
        ("auto(m=-1)", "m = -1|pieces"),
        ("auto(candidates=['bsp'], fresh=true)", "fresh=True with candidates; name the fresh ones"),
    ],
)
def test_wrong_pieces_are_refused(text, message):
    with pytest.raises(pl.UsageError, match=message):
        parse_plan(text)


def test_fresh_leaves_stale_candidates_out():
    run = AutoRun(Auto(m=8, fresh=True), phi=1e6)
    work_in_leases(run, 40, [1.0, 1.0, 1.0, 1.0], stretch=3.0)
    assert run.state.scored
    assert all(each.max_staleness == 0 for each in run.state.scored)
    assert [parse_plan(text).phases[0].controllers[0].takes_stale for text in ("auto(fresh=true)", "auto")] == [
        False,
        True,
    ]
    assert not Auto(candidates=(bsp(),)).takes_stale


def test_balanced_may_be_named_among_the_candidates():
    plan = parse_plan("auto(candidates=['bsp', 'balanced(m=4)'])")
    assert [each.pieces for each in balances_of(plan)] == [4]
    assert str(plan) == "auto(candidates=['bsp', 'balanced(m=4)'])"
    whole = with_whole_minibatches(plan)
    assert [each.candidates for phase in whole.phases for each in phase.controllers] == [(bsp(),)]


def test_a_queue_begins_with_an_update():
    run = AutoRun(Auto(candidates=(bsp(), balanced(8)), m=8), phi=1000.0)
    run.work(60, [1.0, 1.0, 1.0, 8.0])
    [(_, first), (at, then)] = run.changes
    assert (first, then) == ("bsp", "balanced(m=8)")
    assert at % N == 0, "after the last arrival of an update"


def test_a_stale_protocol_that_may_not_go_on_is_left_at_once_for_a_queue():
    run = AutoRun(Auto(candidates=(pl.asp(), balanced(8)), m=8), phi=1000.0, momentum=0.9)
    run.phi = 1e6
    run.work(60, [1.0, 1.0, 1.0, 1.0])
    run.protocol = pl.asp()
    run.work(1, [1.0, 1.0, 1.0, 1.0], has_risen=True)
    run.work(12, [1.0, 1.0, 1.0, 1.0])
    assert run.protocol.name == "balanced(m=8)"


class ThereAndBack(pl.controllers.Controller):
    """Controller that changes to asp at the beginning, and to balanced updates with an opening."""

    may_interrupt = takes_stale = True

    def begin(self, n):
        return 0

    def decide(self, state, observation):
        if observation.trigger != "open" or observation.version not in (0, 12):
            return state, []
        return state, [ChangeProtocol(balanced(8) if observation.version else pl.asp(), "as scripted")]


@pytest.mark.parametrize("by_controller", [False, True])
def test_a_queue_does_not_wait_for_stale_work(by_controller):
    """One worker computes for 1000 s when the plan comes to balanced updates."""
    slow = pl.timing.Slowdown(at_s=1.5, until_s=1e6, factor=1000.0, workers=(3,))
    cluster = pl.Cluster(4, pl.timing.Uniform(0.98, 1.02), slowdowns=[slow])
    controlled = balanced(8).controlled_by(ThereAndBack(), Balance(8, queue=True))
    plan = controlled if by_controller else "asp@updates=12 >> balanced(m=8)"
    run = pl.train(tiny_job(), protocol=plan, cluster=cluster, stop="gradients=60")
    names = [each.reason.split(":")[0] for each in run.history.of(DecisionMade) if each.kind == "protocol"]
    assert names[-2:] == ["asp", "balanced(m=8)"]
    assert run.time_s < 100
    assert 3 in [each.worker for each in run.history.of(WorkInterrupted) if each.version < 12]
    made = run.history.of(UpdateMade)
    assert made[12].workload - made[11].workload == 4
    assert made[12].now_s - made[11].now_s < 4.0  # its first lease is repeated by another worker
