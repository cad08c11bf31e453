"""Changes of protocol between phases: events with all the commands that answer them."""

from math import inf

import pytest

from coordinator_harness import play
from paceline.catalogue.protocols import (
    asp,
    backup,
    bsp,
    k_async,
    k_batch_async,
)
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.protocols.protocol import Protocol


def test_a_full_barrier_waits_for_workers_unblocked_by_a_change_of_protocol():
    script = """
        w0.1 arrives            | accept w0.1
        w1.1 arrives not finite | drop w1.1 (not finite); compute w0.2 on v0; compute w1.2 on v0
        w1.2 arrives not finite | drop w1.2 (not finite)
        at 5 timer              | protocol: bsp: 5 seconds reached; compute w1.3 on v0
        w1.3 arrives            | accept w1.3; apply v1 = w0.1 + w1.3 (every live worker has contributed)
                                | compute w1.4 on v1
    """
    play(Protocol(quorum=3, max_staleness=inf, refill="arrival", max_lead=0).until(seconds=5) >> bsp(), 2, script)


def test_a_full_barrier_after_a_change_of_protocol_does_not_wait_for_a_joining_worker():
    script = """
        w2 joins     | compute w2.1 on v0
        at 5 timer   | protocol: bsp: 5 seconds reached
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (every live worker has contributed); interrupt w2.1
                     | compute w0.2 on v1; compute w1.2 on v1; compute w2.2 on v1
    """
    play(k_async(k=2).until(seconds=5) >> bsp(), 2, script)


def test_the_lead_is_counted_anew_in_a_phase_of_the_same_protocol():
    ahead_of_none = Protocol(quorum=1, max_staleness=inf, refill="arrival", max_lead=0)
    script = """
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached)
        at 5 timer   | protocol: protocol: 5 seconds reached; compute w0.2 on v1
    """
    play(ahead_of_none.until(seconds=5) >> ahead_of_none, 2, script)


NOTICE = "its worker sent a notice in its place, because an update had made it too stale"


def test_a_notice_of_a_gradient_that_a_later_phase_would_accept_is_dropped_and_its_minibatch_dealt_out_again():
    script = f"""
        w0.1 arrives             | accept w0.1; apply v1 = w0.1 (quorum of 1 reached)
                                 | compute w0.2 on v1 shard 0 epoch 0 number 2
        at 5 timer               | protocol: asp: 5 seconds reached
        w1.1 arrives in a notice | drop w1.1 stale 1 ({NOTICE})
                                 | compute w1.2 on v1 shard 0 epoch 0 number 1
    """
    minibatches = MinibatchSampler(2, per_epoch=100, partitioned=False)
    play(backup(k=1).until(seconds=5) >> asp(), 2, script, minibatches=minibatches)


@pytest.mark.parametrize("protocol", [backup(k=1), bsp()], ids=str)
def test_a_notice_is_never_accepted(protocol):
    script = f"""
        w0.1 arrives in a notice | drop w0.1 ({NOTICE}); compute w0.2 on v0
        w1 is lost               |
        w0.2 arrives in a notice | drop w0.2 ({NOTICE}); compute w0.3 on v0
    """
    play(protocol, 2, script)


# -- protocol changes
def test_held_gradients_that_reach_a_new_quorum_are_applied_at_once():
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1
        at 5 timer   | protocol: asp: 5 seconds reached; apply v1 = w0.1 + w1.1 (quorum of 1 reached)
                     | compute w0.2 on v1; compute w1.2 on v1
        w2.1 arrives | accept w2.1 stale 1; apply v2 = w2.1 (quorum of 1 reached); compute w2.2 on v2
    """
    play(bsp().until(seconds=5) >> asp(), 3, script)


def test_held_gradients_below_a_new_quorum_are_kept_and_idle_workers_refilled():
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1
        at 5 timer   | protocol: k_batch_async(k=3): 5 seconds reached; compute w0.2 on v0; compute w1.2 on v0
        w1.2 arrives | accept w1.2; apply v1 = w0.1 + w1.1 + w1.2 (quorum of 3 reached); compute w1.3 on v1
    """
    play(bsp().until(seconds=5) >> k_batch_async(k=3), 3, script)


def test_gradients_in_flight_follow_the_new_staleness_bound():
    looser = """
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        at 5 timer   | protocol: asp: 5 seconds reached
        w1.1 arrives | accept w1.1 stale 1; apply v2 = w1.1 (quorum of 1 reached); compute w1.2 on v2
    """
    play(backup(k=1).until(seconds=5) >> asp(), 2, looser)
    tighter = """
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        at 5 timer   | protocol: bsp: 5 seconds reached
        w1.1 arrives | drop w1.1 stale 1 (too stale); compute w1.2 on v1
    """
    play(asp().until(seconds=5) >> bsp(), 2, tighter)


def test_held_gradients_stay_accepted_under_a_tighter_staleness_bound():
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (quorum of 2 reached); compute w0.2 on v1; compute w1.2 on v1
        w2.1 arrives | accept w2.1 stale 1
        at 5 timer   | protocol: bsp: 5 seconds reached
        w0.2 arrives | accept w0.2
        w1.2 arrives | accept w1.2; apply v2 = w2.1 + w0.2 + w1.2 (every live worker has contributed)
                     | compute w2.2 on v2; compute w0.3 on v2; compute w1.3 on v2
    """
    play(k_async(k=2).until(seconds=5) >> bsp(), 3, script)


@pytest.mark.parametrize(
    ("end", "said", "knobs"),
    [
        ({"updates": 1}, "1 updates", {}),
        ({"gradients": 2}, "2 gradients", {}),
        ({"epochs": 0.5}, "2 gradients", {"per_epoch": 4}),
        ({"fraction": 0.25}, "2 gradients", {"stop": {"gradients": 8}}),
        ({"fraction": 0.25}, "2 gradients", {"stop": {"epochs": 2}, "per_epoch": 4}),
    ],
)
def test_a_phase_ends_with_the_update_that_reaches_its_end(end, said, knobs):
    script = f"""
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (every live worker has contributed)
                     | protocol: asp: {said} reached; compute w0.2 on v1; compute w1.2 on v1
        w1.2 arrives | accept w1.2; apply v2 = w1.2 (quorum of 1 reached); compute w1.3 on v2
    """
    play(bsp().until(**end) >> asp(), 2, script, **knobs)


def test_a_phase_ends_by_seconds_between_two_events():
    script = """
        begin        | wake at 3; protocol: bsp: the run begins; compute w0.1 on v0; compute w1.1 on v0
        w0.1 arrives | accept w0.1
        at 2.9 timer |
        at 3 timer   | protocol: asp: 3 seconds reached; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
    """
    play(bsp().until(seconds=3) >> asp(), 2, script)


def test_a_phase_whose_end_is_already_reached_is_skipped():
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (every live worker has contributed)
                     | protocol: k_async(k=2): 1 updates reached; protocol: asp: 2 gradients reached
                     | compute w0.2 on v1; compute w1.2 on v1
    """
    play(bsp().until(updates=1) >> k_async(k=2).until(gradients=2) >> asp(), 2, script)
