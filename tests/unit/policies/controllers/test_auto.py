from copy import deepcopy

import pytest

import paceline as pl
from arrivals import arrival
from auto_run import AutoRun, N
from paceline.catalogue.parser import parse_plan
from paceline.catalogue.protocols import auto, bsp, pull
from paceline.core.records import DecisionMade
from paceline.policies.controllers.auto import Auto
from paceline.policies.controllers.auto_candidates import default_candidates
from paceline.policies.controllers.base import ChangeProtocol, Note, Work
from paceline.policies.estimators.replay.protocol_scores import Scoring
from selections import parametrize_few
from tiny_jobs import tiny_job


def test_it_begins_with_balanced_updates_and_with_the_pull_of_the_reference_where_minibatches_are_whole():
    assert AutoRun(Auto(m=8)).changes == [(0, "balanced(m=8)")]
    assert AutoRun(Auto()).changes == [(0, "pull(k=4)")]
    assert AutoRun(Auto(candidates=(bsp(), pl.asp()))).changes == [(0, "bsp")]


def test_the_first_choice_comes_after_24_gradients_and_a_replay_of_every_candidate():
    run = AutoRun(Auto(), phi=100.0)
    run.work(5, [1.0, 1.0, 1.0, 1.0])
    assert run.state.scoring is None
    run.work(60, [1.0, 1.0, 1.0, 8.0])
    first = run.changes[1][0]
    assert 24 + len(default_candidates(N)) // 3 <= first <= 24 + 2 * len(default_candidates(N))


def gradients_of_a_scoring(run, trips_s):
    """Return the number of gradients that arrive while the next scoring is in progress."""
    while run.state.scoring is None:
        run.work(1, trips_s)
    begun = run.workload
    while run.state.scoring is not None:
        run.work(1, trips_s)
    return run.workload - begun


def test_the_first_scoring_and_those_after_a_change_take_fewer_arrivals():
    run = AutoRun(Auto(), phi=100.0)
    steady, changed = [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 8.0]
    first, second = gradients_of_a_scoring(run, steady), gradients_of_a_scoring(run, steady)
    after_change = gradients_of_a_scoring(run, changed)
    assert not run.state.is_urgent
    assert 2 * max(first, after_change) < second


def test_a_change_during_a_scoring_makes_the_next_one_urgent_too():
    run = AutoRun(Auto(), phi=100.0)
    gradients_of_a_scoring(run, [1.0] * N)
    while run.state.scoring is None:
        run.work(1, [1.0] * N)
    assert not run.state.is_urgent
    run.state.hasten(run.workload)
    while run.state.scoring is not None:
        run.ask("arrival", arrival=arrival(0.0, 0, 1, loss=1.0), trip_s=1.0, accepted=True)
    assert run.state.is_urgent


def test_noise_calls_for_all_gradients_and_little_noise_for_few_fresh_ones():
    noisy, exact = AutoRun(Auto(), phi=1000.0), AutoRun(Auto(), phi=0.01)
    for run in (noisy, exact):
        run.work(40, [1.0, 1.0, 1.0, 8.0])
    assert noisy.protocol.refill == "arrival"  # no worker waits
    assert exact.protocol.max_staleness == 0


def test_the_latest_scores_are_compared_with_every_phi():
    run = AutoRun(Auto(candidates=(pl.k_sync(k=2), pl.asp())), phi=0.01)
    run.work(140, [1.0, 1.0, 1.0, 8.0])
    assert run.protocol == pl.k_sync(k=2)
    assert run.state.due_at > run.workload + 24
    run.phi, ranked_at = 1000.0, run.state.ranked_at
    run.work(6, [1.0, 1.0, 1.0, 8.0])
    assert run.protocol == pl.asp()
    assert ranked_at + 16 <= run.changes[-1][0] < ranked_at + 16 + N
    run.phi = 0.01
    run.work(5, [1.0, 1.0, 1.0, 8.0])
    assert run.protocol == pl.k_sync(k=2)


@pytest.mark.slow
def test_stale_protocols_are_no_choice_either_while_fresh_ones_are_scored():
    run = AutoRun(Auto(), phi=0.01)
    run.work(148, [1.0, 2.0, 4.0, 8.0])
    assert run.protocol.max_staleness == 0
    run.phi = 1000.0
    run.work(1, [1.0, 2.0, 4.0, 8.0], has_risen=True)
    run.work(100, [1.0, 2.0, 4.0, 8.0])
    assert all(action.protocol.max_staleness == 0 for _, action in run.actions if isinstance(action, ChangeProtocol))


@parametrize_few("rounds", [60, 61, 62, 63], keep=1)
def test_a_run_goes_on_from_its_state(rounds):
    auto = Auto(candidates=(pl.k_sync(k=2), pl.asp()))
    first, second = AutoRun(auto, phi=0.01), AutoRun(auto, phi=0.01)
    first.work(rounds, [1.0, 1.0, 1.0, 8.0])
    second.state.load_state_dict(deepcopy(first.state.state_dict()))
    second.protocol, second.workload, second.version = first.protocol, first.workload, first.version
    for run in (first, second):
        run.actions.clear()
        run.phi = 1000.0
        run.work(60, [1.0, 1.0, 1.0, 8.0])
    assert first.changes
    assert second.actions == first.actions
    assert second.state.state_dict() == first.state.state_dict()


@pytest.mark.slow
def test_replays_before_a_decision_do_not_change_it(monkeypatch):
    runs = [AutoRun(Auto(), prepares=calls) for calls in (0, 1, 2)]
    for run in runs:
        for trips_s in ([1.0, 1.0, 1.0, 8.0], [1.0, 9.0, 9.0, 9.0]):  # the change hastens the second scoring
            run.work(60, trips_s)
            run.phi = 1000.0
    assert len(runs[0].changes) > 2
    assert runs[0].actions == runs[1].actions == runs[2].actions
    assert runs[0].state.state_dict() == runs[2].state.state_dict()
    monkeypatch.setattr(Scoring, "advance", lambda scoring, work: pytest.fail("a decision has replayed"))
    runs[2].state = runs[2].controller.begin(N)
    runs[2].state.scoring = Scoring((bsp(),), [[1.0]] * N)
    runs[2].prepares = 0
    runs[2].ask("arrival", arrival=arrival(0.0, 0, 1, loss=1.0), trip_s=1.0, accepted=True)


def test_a_choice_has_its_numbers_and_the_price_of_staleness():
    run = AutoRun(Auto(candidates=(pull(k=4), pl.asp())), phi=1000.0)
    run.work(60, [1.0, 1.0, 1.0, 8.0])
    [_, (_, change)] = [each for each in run.actions if isinstance(each[1], ChangeProtocol)]
    assert change.protocol == pl.asp()
    assert change.price > 1.5
    assert change.numbers["asp"] > 1.05 * change.numbers["pull(k=4)"]
    assert change.numbers["phi"] == 1000.0
    assert "x the progress of pull(k=4); phi 1e+03; asp" in change.reason


def test_a_protocol_stays_if_the_gain_is_small_or_the_switch_too_dear():
    alike = AutoRun(Auto(candidates=(bsp(), pl.backup(k=4))))
    alike.work(60, [1.0, 1.0, 1.0, 1.0])
    assert alike.changes == [(0, "bsp")]
    assert any(isinstance(action, Note) and "bsp stays" in action.reason for _, action in alike.actions)
    dear = AutoRun(Auto(candidates=(pull(k=4), pl.asp()), price_of_switch_s=1e6), phi=1000.0)
    dear.work(60, [1.0, 1.0, 1.0, 8.0])
    assert dear.changes == [(0, "pull(k=4)")]
    assert "s until the next choice, less than the price of the switch" in dear.actions[-1][1].reason


def test_a_loss_that_does_not_fall_keeps_protocols_fresh():
    run = AutoRun(Auto(), phi=1000.0, has_fallen=False)
    run.work(60, [1.0, 1.0, 1.0, 8.0])
    assert run.protocol.max_staleness == 0
    assert run.actions[-1][1].reason.endswith("; fresh gradients only, because the loss has not fallen yet")


def test_stale_protocols_are_scored_as_soon_as_the_loss_has_fallen():
    run = AutoRun(Auto(), phi=1000.0, has_fallen=False)
    while run.state.scoring is not None or run.state.due_at < run.workload + 80:
        run.work(1, [1.0, 1.0, 1.0, 3.0])
    fell_at, run.has_fallen = run.workload, True
    run.work(20, [1.0, 1.0, 1.0, 3.0])
    assert run.protocol.max_staleness > 0
    assert fell_at < run.changes[-1][0] <= fell_at + 60


def test_stale_candidates_alone_are_kept_even_then():
    run = AutoRun(Auto(candidates=(pl.asp(), pl.k_async(k=2))), phi=1000.0, has_fallen=False)
    run.work(60, [1.0, 1.0, 1.0, 8.0])
    assert run.protocol.max_staleness > 0
    assert "fresh gradients only" not in run.actions[-1][1].reason


def test_a_loss_that_rises_makes_the_protocol_fresh_again():
    run = AutoRun(Auto(candidates=(pull(k=4), pl.asp())), phi=1000.0)
    run.work(60, [1.0, 1.0, 1.0, 8.0])
    assert run.protocol == pl.asp()
    run.work(1, [1.0, 1.0, 1.0, 8.0], has_risen=True)
    run.work(3, [1.0, 1.0, 1.0, 8.0])
    assert run.protocol == pull(k=4)
    assert run.actions[-1][1].reason.startswith("asp is no candidate now; ")
    assert run.actions[-1][1].reason.endswith("because the loss has risen")


def test_the_first_stale_choice_is_little_stale_and_staler_ones_wait_for_48_gradients_without_a_rise():
    run = AutoRun(Auto(candidates=(pull(k=4), pl.k_batch_async(k=4), pl.asp())), phi=3.0)
    run.work(100, [1.0, 2.0, 4.0, 8.0])
    stalenesses = {protocol.name: score.staleness for protocol, score in run.state.scored.items()}
    assert stalenesses["k_batch_async(k=4)"] < 1 < 2 < stalenesses["asp"] < 4
    [_, (first, little), (then, much)] = run.changes
    assert (little, much) == ("k_batch_async(k=4)", "asp")
    assert 96 <= then - first <= 96 + 16 + N
    only_stale = AutoRun(Auto(candidates=(pull(k=4), pl.asp())), phi=3.0)
    only_stale.work(20, [1.0, 2.0, 4.0, 8.0])
    assert only_stale.protocol == pl.asp()


def jump(run, loss, most=24):
    """Let the loss jump, and return after how many gradients the protocol is fresh."""
    run.loss = loss
    for gradients in range(1, most + 1):
        run.workload += 1
        run.ask("arrival", arrival=arrival(0.0, gradients % N, 1, loss=run.loss), trip_s=1.0, accepted=True)
        if run.protocol.max_staleness == 0:
            return gradients
    return None


def test_a_stale_choice_is_taken_back_at_the_first_rise_of_the_loss():
    run = AutoRun(Auto(candidates=(pull(k=4), pl.asp())), phi=1e6)
    run.work(60, [1.0, 1.0, 1.0, 8.0])
    assert run.protocol == pl.asp()
    assert jump(run, 1.1) <= 4
    at, change = run.actions[-1]
    assert change.protocol == pull(k=4)
    assert change.reason.startswith("the loss has risen under asp, which is taken back")
    until = at + 800
    assert f"until {until} gradients" in change.reason
    run.work((until - at) // N - 8, [1.0, 1.0, 1.0, 8.0])
    assert run.protocol == pull(k=4)
    run.work(40, [1.0, 1.0, 1.0, 8.0])
    assert run.protocol == pl.asp()
    assert jump(run, 2.0) <= 4
    assert "until" in run.actions[-1][1].reason
    assert run.state.trial.fresh_until == run.workload + 1600


def test_a_rise_within_the_noise_of_the_loss_is_none_and_fresh_protocols_stay():
    noisy = AutoRun(Auto(candidates=(pull(k=4), pl.asp())), phi=1e6)
    for each in range(240):
        noisy.loss = 1.0 + (each * 0.618) % 1.0
        noisy.work(1, [1.0, 1.0, 1.0, 8.0])
    assert noisy.protocol == pl.asp()
    assert jump(noisy, 1.6) is None
    fresh = AutoRun(Auto(candidates=(pull(k=4), pl.k_sync(k=3))), phi=0.1)
    fresh.work(60, [1.0, 1.0, 1.0, 8.0])
    changes = fresh.changes
    jump(fresh, 5.0)
    assert fresh.changes == changes


def test_momentum_makes_stale_candidates_dearer():
    chosen = {}
    for momentum in (0.0, 0.9):
        run = AutoRun(Auto(candidates=(pl.k_sync(k=3), pl.asp())), phi=1.0, momentum=momentum)
        run.work(40, [1.0, 1.05, 0.95, 8.0])
        chosen[momentum] = next(action.numbers for _, action in run.actions if getattr(action, "numbers", None))
    assert chosen[0.9]["k_sync(k=3)"] == chosen[0.0]["k_sync(k=3)"]
    assert chosen[0.9]["asp"] < 0.5 * chosen[0.0]["asp"]


def test_the_price_under_an_adaptive_optimizer_is_that_of_the_schedule_with_its_momentum():
    """The rate has another price of staleness, see `NoiseRule.with_momentum`, which is not that of the score."""
    prices = {}
    for momentum in (0.0, 0.9):
        run = AutoRun(Auto(candidates=(pl.k_async(k=2), pl.asp())), phi=1.0, momentum=momentum, adaptive=True)
        run.work(40, [1.0, 1.05, 0.95, 8.0])
        prices[momentum] = {protocol.name: score.price for protocol, score in run.state.scored.items()}
        changes = [action for _, action in run.actions if isinstance(action, ChangeProtocol)]
        assert [change.price for change in changes] == [None] * len(changes)
    for protocol in ("k_async(k=2)", "asp"):
        assert prices[0.0][protocol] < prices[0.9][protocol] < 1.5 * prices[0.0][protocol]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [2, 3])
def test_a_protocol_out_of_reach_of_the_live_workers_is_left(lost):
    faults = [pl.Fault(worker=worker, draw=12) for worker in range(lost)]
    cluster = pl.Cluster(4, pl.timing.Uniform(0.9, 1.1), faults=faults)
    plan = auto(candidates=["k_sync(k=4)", "k_sync(k=3)"])
    run = pl.train(tiny_job(), protocol=plan, cluster=cluster, stop="gradients=200")
    assert run.history.totals.used >= 200
    reasons = [each.reason for each in run.history.of(DecisionMade) if each.kind == "protocol"]
    assert reasons[-1].startswith("bsp: ")
    assert "is no candidate now" in reasons[-1]


def test_a_cluster_that_changes_is_followed_at_once():
    run = AutoRun(Auto(candidates=(bsp(), pl.k_sync(k=3))), phi=0.1)
    run.work(100, [1.0, 1.01, 0.99, 1.0])
    assert run.protocol == bsp()
    before = run.workload
    run.work(10, [1.0, 1.01, 0.99, 9.0])
    assert run.protocol == pl.k_sync(k=3)
    assert run.changes[-1][0] - before <= 32


def test_cancelled_work_counts_as_a_longer_trip():
    run = AutoRun(Auto())
    run.work(3, [1.0, 1.0, 1.0])
    run.ask("open", interrupted=[Work(3, 0, 7.0)])
    assert max(run.state.trips.table(range(N), {})[3]) >= 7.0


def test_the_default_candidates_are_those_of_the_catalogue():
    for n in (1, 2, 3, 4, 6, 8, 16, 32):
        candidates = default_candidates(n)
        assert len({each.name for each in candidates}) == len(candidates) <= 35
        for candidate in candidates:
            [phase] = parse_plan(candidate.name).phases
            assert phase.protocol == candidate
            candidate.check_workers(n)


def test_invalid_arguments_are_refused():
    with pytest.raises(pl.UsageError, match="price_of_switch_s=-1"):
        auto(price_of_switch_s=-1)
    with pytest.raises(pl.UsageError, match="dbw is no protocol with constant knobs"):
        auto(candidates=["dbw"])
    with pytest.raises(pl.UsageError, match=r"k_sync\(k=9\): waits for k = 9 gradients of 4 workers"):
        pl.train(tiny_job(), protocol=auto(candidates=["k_sync(k=9)"]), cluster="4*exp(mean=1)", stop="updates=5")
    with pytest.raises(pl.UsageError, match="sets the learning rate by the rule 'noise', but job tiny has"):
        pl.train(tiny_job(lr_rule="proportional"), protocol="auto", cluster="4*exp(mean=1)", stop="updates=5")


def names_of(run):
    return [each.reason.split(":")[0] for each in run.history.of(DecisionMade) if each.kind == "protocol"]


def test_a_run_begins_by_itself_and_changes_where_that_pays():
    slow = pl.Cluster(4, pl.timing.Uniform(0.9, 1.1), speed=[1.0, 1.0, 1.0, 0.1])
    run = pl.train(tiny_job(), protocol="auto", cluster=slow, stop="gradients=200")
    bsp_run = pl.train(tiny_job(), protocol="bsp", cluster=slow, stop="gradients=200")
    assert names_of(run)[:2] == ["auto", "balanced(m=8)"]
    assert run.time_s < 0.5 * bsp_run.time_s
    random = pl.train(tiny_job(), protocol="auto", cluster="4*exp(mean=1)", stop="gradients=200")
    assert len(names_of(random)) > 2
