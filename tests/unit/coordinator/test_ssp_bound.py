"""The SSP bound: how far a worker may be ahead of the slowest one, as events with all commands that answer them."""

from math import inf

from coordinator_harness import play
from paceline.catalogue.protocols import (
    asp,
    ssp,
)
from paceline.protocols.protocol import Protocol


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
    play(Protocol(quorum=1, max_staleness=0, refill="arrival", max_lead=0), 2, script)


def test_the_ssp_bound_does_not_deadlock_if_the_slowest_waits_for_the_update():
    script = """
        w1.1 arrives            | accept w1.1
        w0.1 arrives not finite | drop w0.1 (not finite); compute w0.2 on v0
        w0.2 arrives not finite | drop w0.2 (not finite); apply v1 = w1.1 (no other live worker can contribute)
                                | compute w1.2 on v1
        w1.2 arrives            | accept w1.2; compute w0.3 on v1
    """
    play(Protocol(quorum=2, max_staleness=inf, refill="update", max_lead=0), 2, script)


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
