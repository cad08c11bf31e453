"""Actions of controllers and the scale of the learning rate: events with all the commands that answer them."""

from dataclasses import dataclass, replace
from math import inf

import pytest

from coordinator_harness import Scripted, coordinator, play
from paceline.catalogue.protocols import (
    asp,
    backup,
    bsp,
    k_async,
    k_batch_async,
    pull,
    ssp,
)
from paceline.errors import UsageError
from paceline.policies.controllers.base import (
    CallAgainAt,
    ChangeProtocol,
    CloseUpdate,
    Controller,
    Exclude,
    Readmit,
    SetLead,
    SetQuorum,
)
from paceline.policies.controllers.fixed_quorum import FixedQuorum, QuorumFunction, ScheduledQuorum
from paceline.policies.learning_rate import LRScaling
from paceline.protocols.protocol import Protocol


# -- learning rate
@pytest.mark.parametrize(
    ("rule", "lr_is", "of_two", "of_one"),
    [
        ("constant", "total", "", ""),
        ("proportional", "total", " x 0.5", " x 0.333333"),
        ("constant", "per_worker", " x 4", " x 3"),
        ("proportional", "per_worker", " x 2", ""),
    ],
)
def test_the_learning_rate_follows_the_gradients_of_the_update_and_the_live_workers(rule, lr_is, of_two, of_one):
    closed_after_the_loss = Scripted(arrival=((), (), (CloseUpdate("late"),)))
    script = f"""
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1{of_two} (quorum of 2 reached)
                     | compute w0.2 on v1; compute w1.2 on v1
        w3 is lost   |
        w0.2 arrives | accept w0.2; apply v2 = w0.2{of_one} (late); compute w0.3 on v2
    """
    plan = backup(k=2).controlled_by(closed_after_the_loss)
    play(plan, 4, script, learning_rate=LRScaling(rule, lr_is))


def test_more_gradients_than_workers_scale_the_rate_above_one():
    script = """
        w0.1 arrives | accept w0.1; compute w0.2 on v0
        w0.2 arrives | accept w0.2; compute w0.3 on v0
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w0.2 + w1.1 x 1.5 (quorum of 3 reached); compute w1.2 on v1
    """
    play(pull(k=3), 2, script, learning_rate=LRScaling("proportional"))


# -- controllers
def test_a_fixed_quorum_is_set_at_every_opening():
    script = """
        begin        | protocol: bsp: the run begins; quorum: k=2: fixed k=2
                     | compute w0.1 on v0; compute w1.1 on v0; compute w2.1 on v0
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (quorum of 2 reached: fixed k=2); quorum: k=2: fixed k=2
                     | compute w0.2 on v1; compute w1.2 on v1
        w2.1 arrives | drop w2.1 stale 1 (too stale); compute w2.2 on v1
    """
    play(bsp().controlled_by(FixedQuorum(2)), 3, script)


def test_a_scheduled_quorum_changes_at_its_versions():
    script = """
        begin        | protocol: k_batch_async(k=5): the run begins; quorum: k=1: scheduled k=1 from version 0
                     | compute w0.1 on v0
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached: scheduled k=1 from version 0)
                     | quorum: k=1: scheduled k=1 from version 1; compute w0.2 on v1
        w0.2 arrives | accept w0.2; apply v2 = w0.2 (quorum of 1 reached: scheduled k=1 from version 1)
                     | quorum: k=2: scheduled k=2 from version 2; compute w0.3 on v2
        w0.3 arrives | accept w0.3; compute w0.4 on v2
        w0.4 arrives | accept w0.4; apply v3 = w0.3 + w0.4 (quorum of 2 reached: scheduled k=2 from version 2)
                     | quorum: k=2: scheduled k=2 from version 3; compute w0.5 on v3
    """
    play(k_batch_async(k=5).controlled_by(ScheduledQuorum({0: 1, 2: 2})), 1, script)


def test_a_quorum_function_receives_the_observation():
    def live_less_one(observation):
        return observation.live - 1

    script = """
        begin        | protocol: bsp: the run begins; quorum: k=2: live_less_one chose k=2
                     | compute w0.1 on v0; compute w1.1 on v0; compute w2.1 on v0
        w2 is lost   |
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (quorum of 2 reached: live_less_one chose k=2)
                     | quorum: k=1: live_less_one chose k=1; compute w0.2 on v1; compute w1.2 on v1
    """
    play(bsp().controlled_by(QuorumFunction(live_less_one)), 3, script)


def test_a_quorum_lowered_at_an_arrival_takes_effect_at_once():
    controller = Scripted(arrival=((), (SetQuorum(2, "enough"),)))
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; quorum: k=2: enough; apply v1 = w0.1 + w1.1 (quorum of 2 reached: enough)
                     | compute w0.2 on v1; compute w1.2 on v1
        w0.2 arrives | accept w0.2
        w1.2 arrives | accept w1.2
        w2.1 arrives | drop w2.1 stale 1 (too stale); compute w2.2 on v1
    """
    play(bsp().controlled_by(controller), 3, script)


def test_a_quorum_above_the_worker_count_is_limited_to_the_workers_that_can_contribute():
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (no other live worker can contribute)
                     | quorum: k=9: fixed k=9; compute w0.2 on v1; compute w1.2 on v1
    """
    play(bsp().controlled_by(FixedQuorum(9)), 2, script)


def test_a_controller_closes_the_update_with_the_held_gradients():
    controller = Scripted(arrival=((), (CloseUpdate("slow enough"),)))
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (slow enough); compute w0.2 on v1; compute w1.2 on v1
    """
    play(bsp().controlled_by(controller), 4, script)


def test_an_update_without_gradients_is_never_made():
    controller = Scripted(arrival=((CloseUpdate("at once"),),), open=((CloseUpdate("at once"),),))
    script = """
        w0.1 arrives not finite | drop w0.1 (not finite); compute w0.2 on v0
        w0.2 arrives            | accept w0.2
    """
    play(bsp().controlled_by(controller), 2, script)


def test_a_controller_is_called_again_at_the_requested_time():
    controller = Scripted(arrival=((CallAgainAt(4.0),),), timer=((CloseUpdate("waited long enough"),),))
    script = """
        w0.1 arrives | accept w0.1; wake at 4
        at 3 timer   |
        at 4 timer   | apply v1 = w0.1 (waited long enough); compute w0.2 on v1
        at 5 timer   |
    """
    play(bsp().controlled_by(controller), 2, script)
    assert [observation.trigger for observation in controller.seen] == ["open", "arrival", "timer", "open"]


def test_call_again_requests_end_with_their_phase():
    before, after = Scripted(arrival=((CallAgainAt(9.0),),)), Scripted(timer=((CloseUpdate("asked"),),))
    script = """
        w0.1 arrives | accept w0.1; wake at 9
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (every live worker has contributed)
                     | protocol: k_async(k=2): 1 updates reached; compute w0.2 on v1; compute w1.2 on v1
        w0.2 arrives | accept w0.2
        at 9 timer   |
    """
    play(bsp().controlled_by(before).until(updates=1) >> k_async(k=2).controlled_by(after), 2, script)


def test_an_excluded_worker_is_interrupted_and_readmitted_as_a_joining_worker():
    controller = Scripted(
        arrival=((Exclude(2, "straggler"), CallAgainAt(9.0)),),
        timer=((Readmit(2, "recovered"),),),
    )
    script = """
        w0.1 arrives | accept w0.1; set_aside: worker 2: straggler; interrupt w2.1; wake at 9
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (every live worker has contributed)
                     | compute w0.2 on v1; compute w1.2 on v1
        w2.1 arrives | drop w2.1 (finished after its interrupt)
        at 9 timer   | take_back: worker 2: recovered; compute w2.2 on v1
        w1.2 arrives | accept w1.2
        w0.2 arrives | accept w0.2; apply v2 = w1.2 + w0.2 (every live worker has contributed); interrupt w2.2
                     | compute w1.3 on v2; compute w0.3 on v2; compute w2.3 on v2
    """
    play(bsp().controlled_by(controller), 3, script)


def test_excluding_the_last_awaited_worker_closes_the_update():
    controller = Scripted(arrival=((Exclude(1, "straggler"),),))
    script = """
        w0.1 arrives | accept w0.1; set_aside: worker 1: straggler; interrupt w1.1
                     | apply v1 = w0.1 (every live worker has contributed); compute w0.2 on v1
    """
    play(bsp().controlled_by(controller), 2, script)


def test_excluding_the_slowest_worker_unblocks_the_others():
    controller = Scripted(arrival=((Exclude(1, "straggler"),),))
    script = """
        w0.1 arrives | accept w0.1; set_aside: worker 1: straggler; interrupt w1.1
                     | apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
    """
    play(ssp(lead=0).controlled_by(controller), 2, script)


def test_the_worker_that_has_just_delivered_can_be_excluded():
    controller = Scripted(arrival=((Exclude(0, "straggler"),),))
    script = """
        w0.1 arrives | accept w0.1; set_aside: worker 0: straggler
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (quorum of 2 reached); compute w1.2 on v1
    """
    play(k_batch_async(k=2).controlled_by(controller), 3, script)


def test_a_controller_changes_the_protocol():
    controller = Scripted(arrival=((), (ChangeProtocol(asp(), "close to the end"),)))
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; protocol: asp: close to the end
                     | apply v1 = w0.1 + w1.1 (quorum of 1 reached); compute w0.2 on v1; compute w1.2 on v1
        w2.1 arrives | accept w2.1 stale 1; apply v2 = w2.1 (quorum of 1 reached); compute w2.2 on v2
    """
    play(bsp().controlled_by(controller), 3, script)


def test_a_change_of_the_lead_keeps_how_far_a_worker_is_ahead():
    wider = Protocol(quorum=1, max_staleness=inf, refill="arrival", max_lead=1)
    controller = Scripted(arrival=((), (ChangeProtocol(wider, "wider"),), (ChangeProtocol(wider, "the same"),)))
    script = """
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached)
        w1.1 arrives | accept w1.1 stale 1; protocol: protocol: wider; apply v2 = w1.1 (quorum of 1 reached)
                     | compute w0.2 on v2; compute w1.2 on v2
        w0.2 arrives | accept w0.2; protocol: protocol: the same; apply v3 = w0.2 (quorum of 1 reached)
                     | compute w0.3 on v3
        w0.3 arrives | accept w0.3; apply v4 = w0.3 (quorum of 1 reached)
    """
    play(replace(wider, max_lead=0).controlled_by(controller), 2, script)


def test_a_lead_that_is_set_keeps_the_quorum_and_how_far_a_worker_is_ahead():
    controller = Scripted(open=((SetQuorum(2, "two"), SetLead(1, "wider")), (SetLead(0, "none"),)))
    script = """
        begin        | protocol: protocol: the run begins; lead: lead=1: wider; quorum: k=2: two
                     | compute w0.1 on v0; compute w1.1 on v0
        w0.1 arrives | accept w0.1; compute w0.2 on v0
        w0.2 arrives | accept w0.2; apply v1 = w0.1 + w0.2 (quorum of 2 reached: two); lead: lead=0: none
        w1.1 arrives | accept w1.1 stale 1; apply v2 = w1.1 (quorum of 1 reached); compute w1.2 on v2
        w1.2 arrives | accept w1.2; apply v3 = w1.2 (quorum of 1 reached); compute w0.3 on v3; compute w1.3 on v3
    """
    play(Protocol(quorum=1, max_staleness=inf, refill="arrival", max_lead=0).controlled_by(controller), 2, script)
    assert [each.leads for each in controller.seen if each.trigger == "open"] == [
        {0: 0, 1: 0},
        {0: 2, 1: 0},
        {0: 1, 1: 0},
        {0: 0, 1: 0},
    ]


def test_a_protocol_that_is_set_at_the_same_time_has_its_own_lead():
    lead, protocol = Scripted(arrival=((SetLead(1, "wider"),),)), Scripted(arrival=((ChangeProtocol(asp(), "free"),),))
    script = """
        w0.1 arrives | accept w0.1; lead: lead=1: wider; protocol: asp: free; apply v1 = w0.1 (quorum of 1 reached)
                     | compute w0.2 on v1
    """
    driven = play(
        Protocol(quorum=1, max_staleness=inf, refill="arrival", max_lead=0).controlled_by(protocol, lead), 2, script
    )
    assert driven._phases.protocol == asp()


def test_a_lead_is_refused_under_a_protocol_without_a_bound():
    with pytest.raises(UsageError, match=r"asked for a lead of 2 \(near\) under asp, which has no bound; change"):
        coordinator(asp().controlled_by(Scripted(open=((SetLead(2, "near"),),))), 2).begin()


def test_membership_actions_precede_protocol_and_quorum_actions():
    quorum = Scripted(arrival=((SetQuorum(2, "two"),),))
    protocol = Scripted(arrival=((ChangeProtocol(pull(k=4), "faster"),),))
    membership = Scripted(arrival=((Exclude(2, "straggler"),),))
    script = """
        w0.1 arrives | accept w0.1; set_aside: worker 2: straggler; interrupt w2.1; protocol: pull(k=4): faster
                     | quorum: k=2: two; compute w0.2 on v0
        w0.2 arrives | accept w0.2; apply v1 = w0.1 + w0.2 (quorum of 2 reached: two); compute w0.3 on v1
    """
    play(bsp().controlled_by(quorum, protocol, membership), 3, script)


def test_a_controller_receives_every_arrival_with_its_outcome():
    controller = Scripted()
    script = """
        w0.1 arrives            | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        w1.1 arrives            | drop w1.1 stale 1 (too stale); compute w1.2 on v1
        w1.2 arrives not finite | drop w1.2 (not finite); compute w1.3 on v1
        w1.2 arrives            | drop w1.2 (finished after its interrupt)
    """
    play(backup(k=1).controlled_by(controller), 2, script)
    seen = [(m.trigger, m.now, m.version, m.opened_s, m.live, m.held, m.quorum, m.workload) for m in controller.seen]
    assert seen == [
        ("open", 0, 0, 0, 2, 0, 1, 0),
        ("arrival", 1, 0, 0, 2, 1, 1, 0),
        ("open", 1, 1, 1, 2, 0, 1, 1),
        ("arrival", 2, 1, 1, 2, 0, 1, 1),
        ("arrival", 3, 1, 1, 2, 0, 1, 1),
    ]
    arrivals = [(m.arrival.worker, m.arrival.draw, m.staleness, m.accepted) for m in controller.seen if m.arrival]
    assert arrivals == [(0, 1, 0, True), (1, 1, 1, False), (1, 2, 0, False)]


def test_the_state_of_a_controller_is_reset_with_its_phase():
    @dataclass(frozen=True)
    class Counting(Controller):
        def begin(self, n):
            return n * 100

        def decide(self, state, observation):
            return state + 1, [SetQuorum(1, f"state {state}")] if observation.trigger == "open" else []

    counting = Counting()
    script = """
        begin        | protocol: asp: the run begins; quorum: k=1: state 200; compute w0.1 on v0; compute w1.1 on v0
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached: state 200); quorum: k=1: state 202
                     | compute w0.2 on v1
        w1 is lost   |
        w0.2 arrives | accept w0.2; apply v2 = w0.2 (quorum of 1 reached: state 202)
                     | protocol: bsp: 2 updates reached; quorum: k=1: state 100; compute w0.3 on v2
    """
    plan = asp().controlled_by(counting).until(updates=2) >> bsp().controlled_by(counting)
    play(plan, 2, script)
    play(plan, 2, script)


def test_controllers_of_a_phase_that_begins_within_an_update_are_called_at_once():
    script = """
        at 5 timer   | protocol: asp: 5 seconds reached; quorum: k=2: fixed k=2
        w0.1 arrives | accept w0.1; compute w0.2 on v0
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (quorum of 2 reached: fixed k=2)
                     | quorum: k=2: fixed k=2; compute w1.2 on v1
    """
    play(bsp().until(seconds=5) >> asp().controlled_by(FixedQuorum(2)), 2, script)


def test_a_quorum_below_one_is_refused():
    with pytest.raises(UsageError, match="a controller asked for a quorum of 0"):
        coordinator(bsp().controlled_by(Scripted(open=((SetQuorum(0, "greedy"),),))), 2).begin()


def test_a_controller_that_names_an_unknown_worker_is_refused():
    with pytest.raises(UsageError, match=r"a controller named worker 7; known are \[0, 1\]"):
        coordinator(bsp().controlled_by(Scripted(open=((Exclude(7, "who?"),),))), 2).begin()
