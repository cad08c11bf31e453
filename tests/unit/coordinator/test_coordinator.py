"""Acceptance, refill and interrupts of the coordinator: events with all the commands that answer them."""

from math import inf

import pytest

from arrivals import arrival
from coordinator_harness import coordinator, play
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
)
from paceline.core.events import Apply, Compute
from paceline.errors import UsageError
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
    play(Protocol(quorum="all", max_staleness=inf, refill="arrival"), 3, script)


def test_a_full_barrier_restarts_workers_in_the_order_of_their_arrivals():
    script = """
        w2.1 arrives | accept w2.1
        w0.1 arrives | accept w0.1
        w1.1 arrives | accept w1.1; apply v1 = w2.1 + w0.1 + w1.1 (every live worker has contributed)
                     | compute w2.2 on v1; compute w0.2 on v1; compute w1.2 on v1
    """
    play(bsp(), 3, script)


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


def test_commands_have_all_fields_in_order():
    made = coordinator(k_sync(k=1), 2)
    commands = [*made.begin(), *made.handle(arrival(now=1.0, worker=1, draw=1))]
    [update] = [each for each in commands if isinstance(each, Apply)]
    assert update == Apply(version=1, gradients=update.gradients, lr_scale=1.0, reason="quorum of 1 reached")
    newest = commands[-1]
    assert newest == Compute(
        worker=newest.worker, version=1, draw=2, minibatch=None, upcoming=(), workload=1, accepted=newest.accepted
    )
