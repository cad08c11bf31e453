"""`auto` under balanced updates: what leases tell of round trips, and which plans have a queue."""

import pytest

import paceline as pl
from arrivals import arrival
from auto_run import AutoRun, N
from paceline.catalogue.parser import parse_plan
from paceline.catalogue.protocols import bsp
from paceline.policies.controllers.auto import Auto, with_whole_minibatches
from paceline.policies.controllers.auto_candidates import balanced
from paceline.policies.controllers.balance import balances_of


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
    ],
)
def test_wrong_pieces_are_refused(text, message):
    with pytest.raises(pl.UsageError, match=message):
        parse_plan(text)


def test_balanced_may_be_named_among_the_candidates():
    plan = parse_plan("auto(candidates=['bsp', 'balanced(m=4)'])")
    assert [each.pieces for each in balances_of(plan)] == [4]
    assert str(plan) == "auto(candidates=['bsp', 'balanced(m=4)'])"
    whole = with_whole_minibatches(plan)
    assert [each.candidates for phase in whole.phases for each in phase.controllers] == [(bsp(),)]
