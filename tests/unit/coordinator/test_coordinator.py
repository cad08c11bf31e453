"""The rules of the coordinator, each as a list of events with all the commands that answer it."""

from dataclasses import dataclass
from math import inf

import pytest

from coordinator_harness import Scripted, coordinator, play
from paceline.catalogue.protocols import (
    asp,
    backup,
    bsp,
    k_async,
    k_batch_async,
    k_batch_sync,
    k_sync,
    pull,
    ringmaster,
    ssp,
)
from paceline.coordinator.failure_detector import RoundTripFailureDetector
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.core.duration import Duration
from paceline.core.events import Arrival, Joined, Lost
from paceline.errors import UsageError
from paceline.policies.controllers.base import (
    CallAgainAt,
    ChangeProtocol,
    CloseUpdate,
    Controller,
    Exclude,
    Readmit,
    SetQuorum,
)
from paceline.policies.controllers.fixed_quorum import FixedQuorum, QuorumFunction, ScheduledQuorum
from paceline.policies.learning_rate import LRScaling
from paceline.protocols.protocol import Protocol

# -- the run begins


def test_all_workers_start_on_the_first_version_in_the_order_of_their_numbers():
    script = """
        begin | protocol: asp: the run begins
              | compute w0.1 on v0; compute w1.1 on v0; compute w2.1 on v0
    """
    play(asp(), 3, script)


# -- staleness


def test_a_gradient_that_is_too_stale_is_dropped_and_its_worker_restarts_on_the_newest_version():
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (quorum of 2 reached)
                     | compute w0.2 on v1; compute w1.2 on v1
        w2.1 arrives | drop w2.1 stale 1 (too stale); compute w2.2 on v1
        w2.2 arrives | accept w2.2
    """
    play(backup(k=2), 3, script)


def test_a_gradient_with_staleness_equal_to_the_bound_is_accepted():
    script = """
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        w1.1 arrives | accept w1.1 stale 1; apply v2 = w1.1 (quorum of 1 reached); compute w1.2 on v2
        w2.1 arrives | drop w2.1 stale 2 (too stale); compute w2.2 on v2
    """
    play(ringmaster(r=2), 3, script)


def test_without_a_bound_any_staleness_is_accepted():
    script = """
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        w0.2 arrives | accept w0.2; apply v2 = w0.2 (quorum of 1 reached); compute w0.3 on v2
        w1.1 arrives | accept w1.1 stale 2; apply v3 = w1.1 (quorum of 1 reached); compute w1.2 on v3
    """
    play(asp(), 2, script)


def test_would_accept_predicts_the_acceptance_of_a_gradient():
    driven = play(
        backup(k=1), 2, "w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1"
    )
    assert driven.would_accept(0, 2)
    assert not driven.would_accept(0, 1), "an old draw"
    assert not driven.would_accept(1, 1), "too stale"


def test_a_full_barrier_waits_for_workers_whose_gradient_was_dropped():
    script = """
        w0.1 arrives            | accept w0.1
        w1.1 arrives not finite | drop w1.1 (not finite); compute w1.2 on v0
        w2 joins                | compute w2.1 on v0
        w1.2 arrives            | accept w1.2; apply v1 = w0.1 + w1.2 (every live worker has contributed)
                                | interrupt w2.1; compute w0.2 on v1; compute w1.3 on v1; compute w2.2 on v1
        w0.2 arrives            | accept w0.2
        w1.3 arrives            | accept w1.3
        w2.2 arrives not finite | drop w2.2 (not finite); compute w2.3 on v1
        w2.3 arrives            | accept w2.3; apply v2 = w0.2 + w1.3 + w2.3 (every live worker has contributed)
                                | compute w0.3 on v2; compute w1.4 on v2; compute w2.4 on v2
    """
    play(bsp(), 2, script)


# -- refill


def test_refill_at_the_update_keeps_contributors_idle():
    script = """
        w0.1 arrives | accept w0.1
        w2.1 arrives | accept w2.1; apply v1 = w0.1 + w2.1 (quorum of 2 reached)
                     | compute w0.2 on v1; compute w2.2 on v1
        w1.1 arrives | accept w1.1 stale 1
    """
    play(k_async(k=2), 3, script)


def test_refill_on_arrival_assigns_work_on_the_version_after_the_arrival():
    script = """
        w0.1 arrives | accept w0.1; compute w0.2 on v0
        w2.1 arrives | accept w2.1; apply v1 = w0.1 + w2.1 (quorum of 2 reached); compute w2.2 on v1
        w0.2 arrives | accept w0.2 stale 1; compute w0.3 on v1
    """
    play(k_batch_async(k=2), 3, script)


def test_with_refill_on_arrival_fewer_workers_than_the_quorum_suffice():
    script = """
        w0.1 arrives | accept w0.1; compute w0.2 on v0
        w0.2 arrives | accept w0.2; compute w0.3 on v0
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w0.2 + w1.1 (quorum of 3 reached); compute w1.2 on v1
        w0.3 arrives | drop w0.3 stale 1 (too stale); compute w0.4 on v1
    """
    play(pull(k=3), 2, script)


def test_with_refill_at_the_update_the_quorum_may_not_exceed_the_workers():
    with pytest.raises(UsageError, match="waits for k = 3 gradients of 2 workers"):
        coordinator(k_async(k=3), 2)


def test_a_full_barrier_with_refill_on_arrival_waits_for_every_live_worker():
    script = """
        w0.1 arrives | accept w0.1; compute w0.2 on v0
        w0.2 arrives | accept w0.2; compute w0.3 on v0
        w2.1 arrives | accept w2.1; compute w2.2 on v0
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w0.2 + w2.1 + w1.1 (every live worker has contributed)
                     | compute w1.2 on v1
        w1.2 arrives | accept w1.2; compute w1.3 on v1
        w0.3 arrives | accept w0.3 stale 1; compute w0.4 on v1
        w2.2 arrives | accept w2.2 stale 1; apply v2 = w1.2 + w0.3 + w2.2 (every live worker has contributed)
                     | compute w2.3 on v2
    """
    play(Protocol("all", inf, "arrival"), 3, script)


def test_a_full_barrier_restarts_workers_in_the_order_of_their_arrivals():
    script = """
        w2.1 arrives | accept w2.1
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w2.1 + w0.1 + w1.1 (every live worker has contributed)
                     | compute w2.2 on v1; compute w0.2 on v1; compute w1.2 on v1
    """
    play(bsp(), 3, script)


# -- losses


def test_a_full_barrier_does_not_wait_for_a_lost_worker():
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1
        w2 is lost   | apply v1 = w0.1 + w1.1 (every live worker has contributed)
                     | compute w0.2 on v1; compute w1.2 on v1
    """
    play(bsp(), 3, script)


def test_the_quorum_is_limited_by_the_workers_that_can_contribute():
    script = """
        w0.1 arrives | accept w0.1
        w1 is lost   |
        w2 is lost   | apply v1 = w0.1 (no other live worker can contribute); compute w0.2 on v1
        w0.2 arrives | accept w0.2; apply v2 = w0.2 (no other live worker can contribute); compute w0.3 on v2
    """
    play(backup(k=2), 3, script)


def test_a_held_gradient_of_a_worker_that_is_then_lost_stays_accepted():
    script = """
        w0.1 arrives | accept w0.1
        w0 is lost   |
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (quorum of 2 reached); compute w1.2 on v1
    """
    play(backup(k=2), 3, script)


def test_held_gradients_are_applied_when_every_worker_is_lost():
    script = """
        w0.1 arrives | accept w0.1
        w0 is lost   |
        w1 is lost   |
        w2 is lost   | apply v1 = w0.1 (no other live worker can contribute)
        w1 joins     | compute w1.2 on v1
        w1.2 arrives | accept w1.2; apply v2 = w1.2 (no other live worker can contribute); compute w1.3 on v2
    """
    play(backup(k=2), 3, script)


def test_a_repeated_loss_or_the_loss_of_an_unknown_worker_changes_nothing():
    play(bsp(), 2, "w1 is lost |\n w1 is lost |\n w7 is lost |")


# -- joins


def test_a_joining_worker_is_awaited_from_the_next_update_on():
    script = """
        w0.1 arrives | accept w0.1
        w2 joins     | compute w2.1 on v0
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (every live worker has contributed); interrupt w2.1
                     | compute w0.2 on v1; compute w1.2 on v1; compute w2.2 on v1
        w0.2 arrives | accept w0.2
        w1.2 arrives | accept w1.2
        w2.2 arrives | accept w2.2; apply v2 = w0.2 + w1.2 + w2.2 (every live worker has contributed)
                     | compute w0.3 on v2; compute w1.3 on v2; compute w2.3 on v2
    """
    play(bsp(), 2, script)


def test_a_joining_worker_may_contribute_to_the_open_update():
    script = """
        w2 joins     | compute w2.1 on v0
        w2.1 arrives | accept w2.1
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w2.1 + w0.1 + w1.1 (every live worker has contributed)
                     | compute w2.2 on v1; compute w0.2 on v1; compute w1.2 on v1
    """
    play(bsp(), 2, script)


def test_a_quorum_does_not_wait_for_a_joining_worker():
    script = """
        w1 is lost   |
        w1 joins     | compute w1.2 on v0
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (no other live worker can contribute); interrupt w1.2
                     | compute w0.2 on v1; compute w1.3 on v1
        w0.2 arrives | accept w0.2
        w1.3 arrives | accept w1.3; apply v2 = w0.2 + w1.3 (quorum of 2 reached); compute w0.3 on v2; compute w1.4 on v2
    """
    play(backup(k=2), 2, script)


def test_a_join_of_a_live_worker_is_a_loss_and_a_join():
    script = """
        w1 joins     | compute w1.2 on v0
        w1.1 arrives | drop w1.1 (finished after its interrupt)
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (every live worker has contributed); interrupt w1.2
                     | compute w0.2 on v1; compute w1.3 on v1
    """
    play(bsp(), 2, script)


# -- lead


def test_a_worker_beyond_the_ssp_bound_is_blocked_until_the_slowest_delivers():
    script = """
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        w0.2 arrives | accept w0.2; apply v2 = w0.2 (quorum of 1 reached)
        w1.1 arrives | accept w1.1 stale 2; apply v3 = w1.1 (quorum of 1 reached); compute w1.2 on v3
        w2.1 arrives | accept w2.1 stale 3; apply v4 = w2.1 (quorum of 1 reached)
                     | compute w0.3 on v4; compute w2.2 on v4
    """
    play(ssp(lead=1), 3, script)


def test_a_lead_of_zero_is_lockstep_and_restarts_workers_in_the_order_of_their_arrivals():
    script = """
        w1.1 arrives | accept w1.1; apply v1 = w1.1 (quorum of 1 reached)
        w0.1 arrives | accept w0.1 stale 1; apply v2 = w0.1 (quorum of 1 reached)
        w2.1 arrives | accept w2.1 stale 2; apply v3 = w2.1 (quorum of 1 reached)
                     | compute w1.2 on v3; compute w0.2 on v3; compute w2.2 on v3
    """
    play(ssp(lead=0), 3, script)


def test_the_loss_of_the_slowest_worker_unblocks_the_others():
    script = """
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached)
        w1.1 arrives | accept w1.1 stale 1; apply v2 = w1.1 (quorum of 1 reached)
        w2 is lost   | compute w0.2 on v2; compute w1.2 on v2
    """
    play(ssp(lead=0), 3, script)


def test_the_ssp_count_of_a_joining_worker_starts_at_the_minimum():
    script = """
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached)
        w1.1 arrives | accept w1.1 stale 1; apply v2 = w1.1 (quorum of 1 reached)
                     | compute w0.2 on v2; compute w1.2 on v2
        w0.2 arrives | accept w0.2; apply v3 = w0.2 (quorum of 1 reached)
        w2 joins     | compute w2.1 on v3
        w1.2 arrives | accept w1.2 stale 1; apply v4 = w1.2 (quorum of 1 reached)
        w2.1 arrives | accept w2.1 stale 1; apply v5 = w2.1 (quorum of 1 reached)
                     | compute w0.3 on v5; compute w1.3 on v5; compute w2.2 on v5
    """
    play(ssp(lead=0), 2, script)


def test_a_dropped_gradient_counts_for_the_ssp_bound():
    script = """
        w0.1 arrives            | accept w0.1; apply v1 = w0.1 (quorum of 1 reached)
        w1.1 arrives not finite | drop w1.1 stale 1 (not finite); compute w0.2 on v1; compute w1.2 on v1
        w0.2 arrives            | accept w0.2; apply v2 = w0.2 (quorum of 1 reached)
        w1.2 arrives            | drop w1.2 stale 1 (too stale); compute w0.3 on v2; compute w1.3 on v2
    """
    play(Protocol(1, 0, "arrival", max_lead=0), 2, script)


def test_the_ssp_bound_does_not_deadlock_if_the_slowest_waits_for_the_update():
    script = """
        w1.1 arrives            | accept w1.1
        w0.1 arrives not finite | drop w0.1 (not finite); compute w0.2 on v0
        w0.2 arrives not finite | drop w0.2 (not finite); apply v1 = w1.1 (no other live worker can contribute)
                                | compute w1.2 on v1
        w1.2 arrives            | accept w1.2; compute w0.3 on v1
    """
    play(Protocol(2, inf, "update", max_lead=0), 2, script)


def test_the_ssp_bound_counts_from_the_beginning_of_the_phase():
    script = """
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        w0.2 arrives | accept w0.2; apply v2 = w0.2 (quorum of 1 reached)
                     | protocol: ssp(lead=0): 2 updates reached; compute w0.3 on v2
        w0.3 arrives | accept w0.3; apply v3 = w0.3 (quorum of 1 reached)
        w1.1 arrives | accept w1.1 stale 3; apply v4 = w1.1 (quorum of 1 reached)
                     | compute w0.4 on v4; compute w1.2 on v4
    """
    play(asp().until(updates=2) >> ssp(lead=0), 2, script)


def test_a_full_barrier_waits_for_workers_unblocked_by_a_change_of_protocol():
    script = """
        w0.1 arrives            | accept w0.1
        w1.1 arrives not finite | drop w1.1 (not finite); compute w0.2 on v0; compute w1.2 on v0
        w1.2 arrives not finite | drop w1.2 (not finite)
        at 5 timer              | protocol: bsp: 5 seconds reached; compute w1.3 on v0
        w1.3 arrives            | accept w1.3; apply v1 = w0.1 + w1.3 (every live worker has contributed)
                                | compute w1.4 on v1
    """
    play(Protocol(3, inf, "arrival", max_lead=0).until(seconds=5) >> bsp(), 2, script)


def test_a_full_barrier_after_a_change_of_protocol_does_not_wait_for_a_joining_worker():
    script = """
        w2 joins     | compute w2.1 on v0
        at 5 timer   | protocol: bsp: 5 seconds reached
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (every live worker has contributed); interrupt w2.1
                     | compute w0.2 on v1; compute w1.2 on v1; compute w2.2 on v1
    """
    play(k_async(k=2).until(seconds=5) >> bsp(), 2, script)


# -- interrupts


def test_k_sync_interrupts_stale_tasks_and_restarts_their_workers_last():
    script = """
        w2.1 arrives | accept w2.1
        w0.1 arrives | accept w0.1; apply v1 = w2.1 + w0.1 (quorum of 2 reached); interrupt w1.1; interrupt w3.1
                     | compute w2.2 on v1; compute w0.2 on v1; compute w1.2 on v1; compute w3.2 on v1
    """
    play(k_sync(k=2), 4, script)


def test_k_batch_sync_also_interrupts_restarted_contributors():
    script = """
        w0.1 arrives | accept w0.1; compute w0.2 on v0
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (quorum of 2 reached); interrupt w2.1; interrupt w0.2
                     | compute w1.2 on v1; compute w2.2 on v1; compute w0.3 on v1
    """
    play(k_batch_sync(k=2), 3, script)


def test_ringmaster_with_stops_interrupts_only_tasks_that_are_too_stale():
    script = """
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        w1.1 arrives | accept w1.1 stale 1; apply v2 = w1.1 (quorum of 1 reached); interrupt w2.1
                     | compute w1.2 on v2; compute w2.2 on v2
        w0.2 arrives | accept w0.2 stale 1; apply v3 = w0.2 (quorum of 1 reached); compute w0.3 on v3
    """
    play(ringmaster(r=2, stops=True), 3, script)


def test_a_gradient_that_crosses_its_interrupt_is_only_recorded():
    script = """
        w0.1 arrives            | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); interrupt w1.1
                                | compute w0.2 on v1; compute w1.2 on v1
        w1.1 arrives            | drop w1.1 (finished after its interrupt)
        w1.1 arrives not finite | drop w1.1 (finished after its interrupt)
        w1.2 arrives            | accept w1.2; apply v2 = w1.2 (quorum of 1 reached); interrupt w0.2
                                | compute w1.3 on v2; compute w0.3 on v2
    """
    play(k_sync(k=1), 2, script)


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


# -- silence


def test_a_worker_is_lost_after_the_given_timeout_and_joins_with_a_late_gradient():
    script = """
        begin            | protocol: bsp: the run begins; compute w0.1 on v0; wake at 5; compute w1.1 on v0
        at 1 w0.1 arrives| accept w0.1
        at 4.9 timer     |
        at 5 timer       | lost: worker 1: silent for worker_timeout_s = 5 s
                         | apply v1 = w0.1 (every live worker has contributed); compute w0.2 on v1; wake at 10
        at 6 w0.2 arrives| accept w0.2; apply v2 = w0.2 (every live worker has contributed); compute w0.3 on v2
        at 7 w1.1 arrives| drop w1.1 stale 2 (its worker had been declared lost); compute w1.2 on v2
        at 8 w0.3 arrives| accept w0.3; apply v3 = w0.3 (every live worker has contributed); interrupt w1.2
                         | compute w0.4 on v3; compute w1.3 on v3
        at 9 w0.4 arrives| accept w0.4
        at 10 timer      | wake at 13
        at 13 timer      | lost: worker 1: silent for worker_timeout_s = 5 s
                         | apply v4 = w0.4 (every live worker has contributed); compute w0.5 on v4; wake at 18
    """
    play(bsp(), 2, script, worker_timeout_s=5.0)


def test_a_worker_that_delivers_in_time_is_not_lost():
    script = """
        begin            | protocol: asp: the run begins; compute w0.1 on v0; wake at 5
        at 4 w0.1 arrives| accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        at 5 timer       | wake at 9
        at 9 timer       | lost: worker 0: silent for worker_timeout_s = 5 s; wake at 14
    """
    play(asp(), 1, script, worker_timeout_s=5.0)


def test_without_a_timeout_no_worker_is_ever_lost():
    script = """
        at 2 w0.1 arrives   | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        at 1e9 timer        |
        at 2e9 w1.1 arrives | accept w1.1 stale 1; apply v2 = w1.1 (quorum of 1 reached); compute w1.2 on v2
    """
    wakes = "begin | wake at 3e+09; protocol: asp: the run begins; compute w0.1 on v0; compute w1.1 on v0"
    play(asp(), 2, wakes + script, stop={"seconds": 3e9})


def test_a_derived_timeout_is_logged_when_it_changes_noticeably():
    script = """
        at 2 w0.1 arrives    | worker_timeout: 5.18e+03 s, as the median round trip is 2 s; wake at 5177.07
                             | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        at 4 w0.2 arrives    | worker_timeout: 2.32e+03 s, as the median round trip is 2 s; wake at 2324.72
                             | accept w0.2; apply v2 = w0.2 (quorum of 1 reached); compute w0.3 on v2
        at 6 w0.3 arrives    | wake at 1585.4
                             | accept w0.3; apply v3 = w0.3 (quorum of 1 reached); compute w0.4 on v3
        at 1585.5 timer      | lost: worker 1: silent for 1.59e+03 s, 756 x the median round trip or 10 s
                             | wake at 1591.4
        at 1592 timer        | lost: worker 0: silent for 1.59e+03 s, 756 x the median round trip or 10 s
                             | wake at 3177.4
        at 3000 w1.1 arrives | drop w1.1 stale 3 (its worker had been declared lost); compute w1.2 on v3
                             | wake at 4265.55
    """
    play(asp(), 2, script, failure_detector=RoundTripFailureDetector())


def test_a_derived_timeout_is_at_least_ten_seconds():
    script = """
        at 0.001 w0.1 arrives | worker_timeout: 10 s, as the median round trip is 0.001 s; wake at 10
                              | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        at 10 timer           | lost: worker 1: silent for 10 s, 2468 x the median round trip or 10 s; wake at 10.001
    """
    play(asp(), 2, script, failure_detector=RoundTripFailureDetector())


# -- not finite


def test_a_non_finite_gradient_is_dropped_and_its_worker_gets_another_minibatch():
    script = """
        begin                   | protocol: bsp: the run begins
                                | compute w0.1 on v0 shard 0 epoch 0 number 0
                                | compute w1.1 on v0 shard 0 epoch 0 number 1
        w0.1 arrives not finite | drop w0.1 (not finite); compute w0.2 on v0 shard 0 epoch 0 number 2
        w0.2 arrives            | accept w0.2
        w1.1 arrives            | accept w1.1; apply v1 = w0.2 + w1.1 (every live worker has contributed)
                                | compute w0.3 on v1 shard 0 epoch 0 number 3
                                | compute w1.2 on v1 shard 0 epoch 1 number 0
    """
    play(bsp(), 2, script, minibatches=MinibatchSampler(2, per_epoch=4, partitioned=False))


def test_dropped_interrupted_and_lost_minibatches_are_requeued():
    minibatches = MinibatchSampler(3, per_epoch=100, partitioned=False)
    script = """
        begin        | protocol: k_sync(k=1): the run begins
                     | compute w0.1 on v0 shard 0 epoch 0 number 0
                     | compute w1.1 on v0 shard 0 epoch 0 number 1
                     | compute w2.1 on v0 shard 0 epoch 0 number 2
        w2 is lost   |
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); interrupt w1.1
                     | compute w0.2 on v1 shard 0 epoch 0 number 2
                     | compute w1.2 on v1 shard 0 epoch 0 number 1
    """
    play(k_sync(k=1), 3, script, minibatches=minibatches)
    minibatches = MinibatchSampler(2, per_epoch=100, partitioned=False)
    script = """
        begin        | protocol: backup(k=1): the run begins
                     | compute w0.1 on v0 shard 0 epoch 0 number 0
                     | compute w1.1 on v0 shard 0 epoch 0 number 1
        w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached)
                     | compute w0.2 on v1 shard 0 epoch 0 number 2
        w1.1 arrives | drop w1.1 stale 1 (too stale); compute w1.2 on v1 shard 0 epoch 0 number 1
    """
    play(backup(k=1), 2, script, minibatches=minibatches)


def test_ten_consecutive_non_finite_gradients_of_a_worker_stop_the_run():
    nine = "\n".join(
        f"w1.{i} arrives not finite | drop w1.{i} (not finite); compute w1.{i + 1} on v0" for i in range(1, 10)
    )
    script = f"""
        {nine}
        w0.1 arrives not finite  | drop w0.1 (not finite); compute w0.2 on v0
        w1.10 arrives not finite | drop w1.10 (not finite)
                | stop not_finite: 10 gradients in a row of worker 1 were not finite, the last at update 0
                                 | lower the learning rate, clip gradients (clip_norm=) or check the data
        w0.2 arrives             |
    """
    assert play(asp(), 2, script).stopped


def test_an_accepted_gradient_resets_the_count_of_non_finite_ones():
    driven = coordinator(asp(), 1)
    driven.begin()
    for draw in range(1, 40):
        driven.handle(Arrival(draw, 0, draw, finite=draw % 10 == 0))
    assert not driven.stopped


def test_a_rejoin_resets_the_count_of_non_finite_gradients():
    driven = coordinator(asp(), 2)
    driven.begin()
    for draw in range(1, 19):
        if draw == 10:
            driven.handle(Lost(draw - 0.5, 0, "unplugged"))
            driven.handle(Joined(draw - 0.5, 0))
        driven.handle(Arrival(draw, 0, draw + (draw >= 10), finite=False))
    assert not driven.stopped


# -- stops

ONE = "accept w0.1; apply v1 = w0.1 (quorum of 1 reached)"


@pytest.mark.parametrize(
    ("stop", "reason", "knobs"),
    [
        ({"updates": 2}, "updates: 2 updates made", {}),
        ({"gradients": 2}, "gradients: 2 gradients applied", {}),
        ({"epochs": 0.5}, "epochs: 0.5 epochs, 2 gradients, applied", {"per_epoch": 4}),
        ({"epochs": 0.5, "gradients": 3}, "epochs: 0.5 epochs, 2 gradients, applied", {"per_epoch": 4}),
        ({"epochs": 1, "gradients": 2}, "gradients: 2 gradients applied", {"per_epoch": 4}),
        ({"updates": 2, "gradients": 2}, "updates: 2 updates made", {}),
    ],
)
def test_the_update_that_reaches_the_end_stops_the_run(stop, reason, knobs):
    script = f"""
        w0.1 arrives | {ONE}; compute w0.2 on v1
        w0.2 arrives | accept w0.2; apply v2 = w0.2 (quorum of 1 reached); stop {reason}
        w1.1 arrives |
    """
    play(asp(), 2, script, stop=stop, **knobs)


def test_workload_is_counted_in_gradients_and_may_overshoot_by_an_update():
    script = """
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w0.1 + w1.1 (every live worker has contributed)
                     | compute w0.2 on v1; compute w1.2 on v1
        w0.2 arrives | accept w0.2
        w1.2 arrives | accept w1.2; apply v2 = w0.2 + w1.2 (every live worker has contributed)
                     | stop gradients: 4 gradients applied
    """
    assert play(bsp(), 2, script, stop={"gradients": 3}).workload == 4


def test_seconds_stop_the_run_between_updates():
    script = """
        begin        | wake at 3; protocol: bsp: the run begins; compute w0.1 on v0; compute w1.1 on v0
        w0.1 arrives | accept w0.1
        at 2.9 timer |
        at 3 timer   | stop seconds: 3 seconds have passed
    """
    play(bsp(), 2, script, stop={"seconds": 3})


def test_an_accuracy_reached_stops_the_run():
    script = f"""
        w0.1 arrives               | {ONE}; evaluate v1; compute w0.2 on v1
        v1 evaluated accuracy=0.89 |
        w0.2 arrives               | accept w0.2; apply v2 = w0.2 (quorum of 1 reached); evaluate v2; compute w0.3 on v2
        v2 evaluated accuracy=0.9  | stop accuracy: accuracy 0.9000 of version 2 reached the target 0.9
    """
    play(asp(), 1, script, stop={"accuracy": 0.9}, evaluate_every=Duration("updates", 1))


def test_an_abort_of_the_engine_stops_the_run():
    play(asp(), 1, "quit: disk full | stop failed: disk full")


@pytest.mark.parametrize(("n", "window"), [(1, 10), (3, 10), (12, 12)])
def test_the_loss_is_the_mean_over_the_last_accepted_gradients_of_a_full_window(n, window):
    driven = coordinator(asp(), n, stop={"loss": 0.5})
    driven.begin()
    losses = [2.0] + [0.4] * (window - 2) + [0.3, 0.5]  # the mean is at most 0.5 once the first has left the window
    for draw, loss in enumerate(losses, start=1):
        assert not driven.stopped
        driven.handle(Arrival(draw - 0.5, 0, draw - 1, loss=0.0))  # an old draw does not count
        commands = driven.handle(Arrival(draw, 0, draw, loss=loss))
    assert driven.stopped
    mean = sum(losses[1:]) / window
    assert commands[-1] == ("loss", f"mean loss {mean:.6g} reached the target 0.5")


def test_a_loss_at_the_target_stops_when_the_window_is_full():
    driven = coordinator(asp(), 1, stop={"loss": 0.5})
    driven.begin()
    for draw in range(1, 11):
        assert not driven.stopped
        driven.handle(Arrival(draw, 0, draw, loss=0.5))
    assert driven.stopped


# -- evaluation


def test_one_evaluation_is_pending_at_a_time_and_the_next_is_due_at_a_multiple():
    def update(i):
        return f"w0.{i} arrives | accept w0.{i}; apply v{i} = w0.{i} (quorum of 1 reached)"

    script = f"""
        {update(1)}               ; compute w0.2 on v1
        {update(2)}; evaluate v2  ; compute w0.3 on v2
        {update(3)}               ; compute w0.4 on v3
        {update(4)}               ; compute w0.5 on v4
        {update(5)}               ; compute w0.6 on v5
        v2 evaluated accuracy=0.1 |
        {update(6)}; evaluate v6  ; compute w0.7 on v6
        v6 evaluated accuracy=0.1 |
        {update(7)}               ; compute w0.8 on v7
        {update(8)}; evaluate v8  ; compute w0.9 on v8
    """
    play(asp(), 1, script, evaluate_every=Duration("updates", 2))


def test_evaluations_are_paced_by_workload_or_by_seconds():
    script = """
        w0.1 arrives              | accept w0.1
        w1.1 arrives              | accept w1.1; apply v1 = w0.1 + w1.1 (every live worker has contributed)
                                  | compute w0.2 on v1; compute w1.2 on v1
        w0.2 arrives              | accept w0.2
        w1.2 arrives              | accept w1.2; apply v2 = w0.2 + w1.2 (every live worker has contributed); evaluate v2
                                  | compute w0.3 on v2; compute w1.3 on v2
    """
    play(bsp(), 2, script, evaluate_every=Duration("gradients", 3))
    script = f"""
        at 2.9 w0.1 arrives       | {ONE}; compute w0.2 on v1
        at 3.5 w0.2 arrives       | accept w0.2; apply v2 = w0.2 (quorum of 1 reached); evaluate v2; compute w0.3 on v2
        v2 evaluated accuracy=0.1 |
        at 5.9 w0.3 arrives       | accept w0.3; apply v3 = w0.3 (quorum of 1 reached); compute w0.4 on v3
        at 6 w0.4 arrives         | accept w0.4; apply v4 = w0.4 (quorum of 1 reached); evaluate v4; compute w0.5 on v4
    """
    play(asp(), 1, script, evaluate_every=Duration("seconds", 3))


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


# -- order


def test_idle_workers_restart_before_interrupted_ones():
    script = """
        w3.1 arrives | accept w3.1
        w1.1 arrives | accept w1.1; apply v1 = w3.1 + w1.1 (quorum of 2 reached); interrupt w0.1; interrupt w2.1
                     | compute w3.2 on v1; compute w1.2 on v1; compute w0.2 on v1; compute w2.2 on v1
        w2.2 arrives | accept w2.2
        w3.2 arrives | accept w3.2; apply v2 = w2.2 + w3.2 (quorum of 2 reached); interrupt w1.2; interrupt w0.2
                     | compute w2.3 on v2; compute w3.3 on v2; compute w1.3 on v2; compute w0.3 on v2
    """
    play(k_sync(k=2), 4, script)


# -- edges of membership and phases


def test_a_joining_worker_that_is_alone_gets_no_stale_task():
    script = """
        w0 is lost   |
        w0 joins     | compute w0.2 on v0
        w0.2 arrives | accept w0.2; apply v1 = w0.2 (no other live worker can contribute); compute w0.3 on v1
    """
    play(k_batch_sync(k=3), 1, script)


def test_a_rejoining_worker_starts_on_the_version_that_its_loss_completes():
    script = """
        w0.1 arrives | accept w0.1
        w1 joins     | apply v1 = w0.1 (every live worker has contributed); compute w0.2 on v1; compute w1.2 on v1
    """
    play(bsp(), 2, script)


def test_a_contributor_that_rejoins_waits_for_the_update():
    script = """
        w0.1 arrives | accept w0.1
        w0 is lost   |
        w0 joins     |
        w1.1 arrives | accept w1.1
        w2.1 arrives | accept w2.1; apply v1 = w0.1 + w1.1 + w2.1 (quorum of 3 reached)
                     | compute w0.2 on v1; compute w1.2 on v1; compute w2.2 on v1
    """
    play(k_async(k=3), 3, script)


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


def test_a_run_ends_when_every_worker_is_lost_and_none_rejoins():
    script = """
        begin       | protocol: asp: the run begins; compute w0.1 on v0; wake at 5
        at 5 timer  | lost: worker 0: silent for worker_timeout_s = 5 s; wake at 10
        at 10 timer | stop no_workers: every worker is lost, and none has come back
    """
    play(asp(), 1, script, worker_timeout_s=5.0)


def test_a_controller_that_names_an_unknown_worker_is_refused():
    with pytest.raises(UsageError, match=r"a controller named worker 7; known are \[0, 1\]"):
        coordinator(bsp().controlled_by(Scripted(open=((Exclude(7, "who?"),),))), 2).begin()
