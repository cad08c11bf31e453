"""What happens at a switch, and to workers that were set aside: events with all the commands that answer them."""

from functools import partial
from itertools import pairwise
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from coordinator_harness import Scripted, coordinator, play
from paceline.catalogue.modifiers import ADDITIONS
from paceline.catalogue.parser import parse_plan
from paceline.catalogue.protocols import asp, bsp, k_sync
from paceline.coordinator.phases import PhaseProgress
from paceline.core.duration import Duration
from paceline.core.events import Apply, Arrival, SetTimer, Timer
from paceline.errors import PacelineWarning
from paceline.policies.controllers.base import ChangeProtocol, Exclude, Note, Probe, Readmit, ReplaceWorker
from paceline.run.plan_json import plan_as_json, plan_of
from tiny_jobs import tiny_job

# -- probes


def aside_then(*answers):
    """Set worker 2 aside when the first update is opened, then answer at each further one."""
    return Scripted(open=((Exclude(2, "straggler"),), *answers))


@pytest.mark.parametrize(("how", "busy_s"), [("", 3.0), (" in a notice", 3.5)])
def test_a_probe_is_not_awaited_and_its_gradient_is_not_used(how, busy_s):
    controller = aside_then((Probe(2),), (Probe(2),), (Probe(2),))
    script = f"""
        begin        | protocol: bsp: the run begins; set_aside: worker 2: straggler
                     | compute w0.1 on v0; compute w1.1 on v0
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (every live worker has contributed)
                     | compute w2.1 on v1; compute w0.2 on v1; compute w1.2 on v1
        w0.2 arrives | accept w0.2
        w1.2 arrives | accept w1.2; apply v2 = w0.2 + w1.2 (every live worker has contributed)
                     | compute w0.3 on v2; compute w1.3 on v2
        w2.1 arrives{how} | drop w2.1 stale 1 (only a probe of its worker)
        w0.3 arrives | accept w0.3
        w1.3 arrives | accept w1.3; apply v3 = w0.3 + w1.3 (every live worker has contributed)
                     | compute w2.2 on v3; compute w0.4 on v3; compute w1.4 on v3
    """
    play(bsp().controlled_by(controller), 3, script)
    [probe] = [
        observation for observation in controller.seen if observation.arrival and observation.arrival.worker == 2
    ]
    assert (probe.busy_s, probe.accepted, probe.live) == (busy_s, False, 2)


def test_a_probe_is_interrupted_when_its_worker_is_readmitted():
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (every live worker has contributed)
                     | compute w2.1 on v1; compute w0.2 on v1; compute w1.2 on v1
        w0.2 arrives | accept w0.2
        w1.2 arrives | accept w1.2; apply v2 = w0.2 + w1.2 (every live worker has contributed)
                     | take_back: worker 2: recovered; interrupt w2.1
                     | compute w0.3 on v2; compute w1.3 on v2; compute w2.2 on v2
        w2.1 arrives | drop w2.1 (finished after its interrupt)
    """
    play(bsp().controlled_by(aside_then((Probe(2),), (Readmit(2, "recovered"),))), 3, script)


def test_a_worker_lost_during_a_probe_can_rejoin():
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (quorum of 2 reached)
                     | compute w2.1 on v1; compute w0.2 on v1; compute w1.2 on v1
        w2 is lost   |
        w2 joins     | compute w2.2 on v1
        w2.2 arrives | accept w2.2
    """
    play(pl.k_async(k=2).controlled_by(aside_then((Probe(2),), (Probe(2),))), 3, script)


def test_only_an_excluded_worker_is_probed_or_readmitted():
    controller = Scripted(open=((Probe(1), Readmit(0, "it is there")),))
    script = """
        begin        | protocol: asp: the run begins; compute w0.1 on v0; compute w1.1 on v0
    """
    play(asp().controlled_by(controller), 2, script)


def test_the_last_worker_is_never_excluded():
    controller = Scripted(open=((Exclude(0, "slow"), Exclude(1, "slow"), Exclude(2, "slow")),))
    script = """
        begin        | protocol: bsp: the run begins; set_aside: worker 0: slow; set_aside: worker 1: slow
                     | kept: worker 2, the last one, in spite of: slow; compute w2.1 on v0
        w2.1 arrives | accept w2.1; apply v1 = w2.1 (every live worker has contributed); compute w2.2 on v1
    """
    play(bsp().controlled_by(controller), 3, script)


def test_a_restart_is_requested_only_for_a_known_worker():
    controller = Scripted(open=((Exclude(2, "slow"), ReplaceWorker(2), ReplaceWorker(0)), (ReplaceWorker(1),)))
    script = """
        begin        | protocol: bsp: the run begins; set_aside: worker 2: slow; replace w2; replace w0
                     | compute w0.1 on v0; compute w1.1 on v0
        w1 is lost   |
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (every live worker has contributed); compute w0.2 on v1
    """
    play(bsp().controlled_by(controller), 3, script)


# -- the end of a phase


def test_controllers_are_called_at_the_end_of_their_phase_and_workers_are_readmitted():
    controller = Scripted(open=((Exclude(2, "straggler"),),), end=((Readmit(2, "the phase ends"),),))
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (every live worker has contributed)
                     | take_back: worker 2: the phase ends; protocol: asp: 2 gradients reached
                     | compute w0.2 on v1; compute w1.2 on v1; compute w2.1 on v1
        w2.1 arrives | accept w2.1; apply v2 = w2.1 (quorum of 1 reached); compute w2.2 on v2
    """
    play(bsp().controlled_by(controller).until(gradients=2) >> asp(), 3, script)


def test_controllers_are_not_called_at_the_end_of_the_run():
    controller = Scripted()
    driven = coordinator(bsp().controlled_by(controller), 1, stop={"updates": 1})
    driven.begin()
    driven.handle(Arrival(1.0, 0, 1))
    assert driven.stopped
    assert "end" not in [observation.trigger for observation in controller.seen]


def switched(ends, counts):
    """Return the workloads at which two workers under BSP, ASP, and BSP again come to the next phase."""
    away = (), (ChangeProtocol(asp(), "away", counts=counts),), (), (ChangeProtocol(bsp(), "back"),)
    driven = coordinator(bsp().controlled_by(Scripted(open=away)).until(**ends) >> k_sync(k=1), 2, per_epoch=4)
    commands, now = driven.begin(), 0.0
    while driven._phases.protocol.name != "k_sync(k=1)":
        now += 1.0
        worker = int(now) % 2
        if worker in driven._membership.table.in_flight:
            commands = driven.handle(Arrival(now, worker, driven._workers[worker].draw))
        for command in commands:
            if type(command).__name__ == "SetTimer" and command.at_s <= now:
                driven.handle(Timer(now))
    return driven.workload, driven.version


def test_progress_under_an_uncounted_protocol_extends_the_phase():
    # Update 1 is of BSP and of 2 gradients, 2 and 3 of ASP and of 1 each, and the rest of BSP again.
    assert switched({"gradients": 6}, counts=True) == (6, 4)
    assert switched({"gradients": 6}, counts=False) == (8, 5)
    assert switched({"updates": 4}, counts=True) == (6, 4)
    assert switched({"updates": 4}, counts=False) == (10, 6)
    assert switched({"epochs": 1.5}, counts=False) == (8, 5)


def test_a_phase_whose_protocol_is_replaced_for_good_never_ends():
    controller = Scripted(open=((ChangeProtocol(asp(), "away", counts=False),),))
    driven = coordinator(bsp().controlled_by(controller).until(updates=2) >> k_sync(k=1), 1)
    driven.begin()
    for draw in range(1, 20):
        driven.handle(Arrival(float(draw), 0, draw))
    assert driven.version == 19
    assert driven._phases.protocol == asp()


def test_a_phase_of_seconds_sets_a_timer_for_its_extended_end():
    controller = Scripted(open=((), (ChangeProtocol(asp(), "away", counts=False),), (ChangeProtocol(bsp(), "back"),)))
    driven = coordinator(bsp().controlled_by(controller).until(seconds=4) >> k_sync(k=1), 1)
    driven.begin()
    driven.handle(Arrival(1.0, 0, 1))
    back = driven.handle(Arrival(3.0, 0, 2))
    assert SetTimer(6.0) in back
    driven.handle(Timer(4.0))
    assert driven._phases.protocol == bsp()
    driven.handle(Timer(6.0))
    assert driven._phases.protocol.name == "k_sync(k=1)"


@given(
    st.lists(st.tuples(st.sampled_from(["pause", "go on"]), st.integers(0, 9)), max_size=12),
    st.integers(1, 30),
)
def test_phase_progress_counts_every_interval_that_is_not_excluded(stretches, amount):
    progress, position, counted, counts = PhaseProgress(Duration("updates", amount)), 0, 0, True
    for what, length in stretches:
        (progress.pause if what == "pause" else progress.resume)(position)
        counts = what == "go on"
        position += length
        counted += length * counts
        assert progress.is_done(position) == (counted >= amount)
        again = PhaseProgress(progress.end)
        again.load_state_dict(progress.state_dict())
        assert again.is_done(position + 1) == progress.is_done(position + 1)


def test_a_phase_without_an_end_is_never_done():
    assert PhaseProgress(None).ends_at == inf
    assert not PhaseProgress(None).is_done(1e300)


# -- momentum


def limits(plan, n, per_epoch, updates):
    """Return the largest momentum of each update of one gradient or more, and what is said about it."""
    driven = coordinator(plan, n, per_epoch=per_epoch, total=10**6)
    commands, found, said = driven.begin(), [], []
    now = 0.0
    while len(found) < updates:
        now += 1.0
        worker, state = next(iter(driven._membership.table.in_flight.items()))
        commands = driven.handle(Arrival(now, worker, state.draw))
        found += [command.momentum_limit for command in commands if isinstance(command, Apply)]
        said += [command.reason for command in commands if getattr(command, "kind", "") == "momentum"]
    return found, said


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("keep", [inf] * 10),
        ("zero", [0.0] * 10),
        ("1/n", [0.5] * 10),
        ("i/n", [0, 0, 0, 0.5, 0.5, 0.5, inf, inf, inf, inf]),
        ("2^i/n", [0.5, 0.5, 0.5, inf, inf, inf, inf, inf, inf, inf]),
    ],
)
def test_the_momentum_follows_its_rule_from_the_switch_on(rule, expected):
    plan = bsp().until(updates=3) >> asp() + pl.momentum(rule)
    found, said = limits(plan, n=2, per_epoch=3, updates=13)
    assert found == [inf] * 3 + expected
    changes = [after for before, after in pairwise([inf, *expected]) if after != before]
    assert len(said) == len(changes), "nothing is said of a ramp that is over"


def test_the_limit_ends_with_its_phase():
    plan = (bsp() + pl.momentum("zero")).until(updates=2) >> asp()
    found, said = limits(plan, n=1, per_epoch=3, updates=4)
    assert found == [0.0, 0.0, inf, inf]
    assert said == [
        "at most 0: zero after 0 epochs of this phase",
        "the optimizer's own: keep after 0 epochs of this phase",
    ]


def test_a_ramp_by_epoch_needs_epochs():
    with pytest.raises(pl.UsageError, match="have no epochs to raise the momentum by"):
        coordinator(asp() + pl.momentum("i/n"), 2)
    coordinator(asp() + pl.momentum("1/n"), 2)


# -- what stands after a plus


@pytest.mark.parametrize("name", ["stragglers", "greedy", "elastic"])
def test_policies_survive_text_and_json(name):
    text = f"bsp + {name}(window=3, persistent_s=60.0)@25% >> asp + momentum(rule='1/n')"
    plan = parse_plan(text)
    assert str(plan) == text.replace("@25%", " until 0.25 of the workload")
    assert plan_of(plan_as_json(plan)).in_full == plan.in_full
    built = (bsp() + ADDITIONS[name](window=3, persistent_s=60.0)).until(0.25) >> asp() + pl.momentum("1/n")
    assert built.in_full == plan.in_full
    assert str(bsp() + ADDITIONS[name]()) == f"bsp + {name}"


def test_a_policy_stands_beside_the_controllers_of_a_named_protocol():
    phase = parse_plan("dbw + elastic").phases[0]
    assert [type(each).__name__ for each in phase.controllers] == ["DBW", "IdleWorkers", "Elastic"]
    assert str(phase) == "dbw + elastic"


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        ("bsp + elastic(window=0)", "window"),
        ("bsp + elastic(consecutive=1.5)", "consecutive"),
        ("bsp + greedy(min_gap=1)", "min_gap"),
        ("bsp + greedy(min_gap=-0.1)", "min_gap"),
        ("bsp + stragglers(persistent_s=0)", "persistent_s"),
        ("bsp + stragglers(sliding=2)", "sliding=2, expected true or false"),
        ("bsp + elastik", "elastic"),
        ("asp + greedy", "the phase runs asp already; give a synchronous one, as bsp"),
        ("bsp + elastic + greedy", "the phase has a straggler policy already; give only one of"),
        ("bsp + stragglers + elastic", "the phase has a straggler policy already; give only one of"),
        ("bsp@25% + elastic >> asp", r"'25% \+ elastic': the end comes last; type bsp \+ elastic@25%"),
        ("asp + momentum(rule=half)", "momentum rule 'half' is not known"),
        ("asp + momentum(rule='1/n') + momentum(rule=zero)", "the momentum has a rule already"),
    ],
)
def test_invalid_additions_to_a_phase_are_refused(protocol, message):
    with pytest.raises(pl.UsageError, match=message):
        pl.train(tiny_job(), protocol=protocol, cluster=pl.Cluster(2), stop="updates=2")


def test_greedy_changes_to_a_protocol():
    with pytest.raises(pl.UsageError, match=r"to='asp', expected a pl.plans.Protocol"):
        pl.controllers.Greedy(to="asp")


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.1), partial(torch.optim.Adam, lr=0.1)])
def test_an_optimizer_without_a_momentum_is_refused(optimizer):
    with pytest.raises(pl.UsageError, match="has no momentum to limit"):
        pl.train(
            tiny_job(optimizer=optimizer), protocol="asp + momentum(rule=zero)", cluster=pl.Cluster(2), stop="updates=2"
        )


def test_the_only_worker_is_never_excluded_and_a_note_is_recorded():
    with pytest.warns(PacelineWarning, match="the only worker is never excluded"):
        pl.train(tiny_job(), protocol="bsp + elastic", cluster=pl.Cluster(1), stop="updates=2")


@pytest.mark.parametrize("protocol", ["asp", "pull(k=2)", "k_batch_async(k=2)"])
def test_excluding_stragglers_without_a_barrier_causes_a_warning(protocol):
    with pytest.warns(PacelineWarning, match="does not wait for stragglers"):
        coordinator(parse_plan(f"{protocol} + elastic"), 2)


@pytest.mark.parametrize("protocol", ["bsp", "k_sync(k=2)", "ssp(lead=1)", "k_async(k=2)", "dbw", "dbw(base=pull)"])
def test_excluding_stragglers_with_a_barrier_causes_no_warning(protocol):
    coordinator(parse_plan(f"{protocol} + elastic"), 2)


def test_detections_are_recorded_before_the_actions_they_cause():
    controller = Scripted(open=((Exclude(1, "slow"), Note("straggler", "worker 1: slow", 1)),))
    script = """
        begin        | protocol: bsp: the run begins; straggler: worker 1: slow; set_aside: worker 1: slow
                     | compute w0.1 on v0
    """
    play(bsp().controlled_by(controller), 2, script)
