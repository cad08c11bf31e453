"""Workers that are lost, join, or rejoin: events with all the commands that answer them."""

from coordinator_harness import play
from paceline.catalogue.protocols import (
    asp,
    backup,
    bsp,
    k_async,
    k_batch_sync,
)
from paceline.coordinator.failure_detector import RoundTripFailureDetector


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
        at 2 w0.1 arrives | worker_timeout: 5.11e+03 s, at a median round trip of 2 s and 0.1 losses per hour
          | wake at 5108.89
          | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        at 4 w0.2 arrives | worker_timeout: 2.3e+03 s, at a median round trip of 2 s and 0.1 losses per hour
          | wake at 2297.22
          | accept w0.2; apply v2 = w0.2 (quorum of 1 reached); compute w0.3 on v2
        at 6 w0.3 arrives | wake at 1567.66
          | accept w0.3; apply v3 = w0.3 (quorum of 1 reached); compute w0.4 on v3
        at 1567.7 timer | lost: worker 1: silent for 1.57e+03 s, at a median round trip of 2 s and 0.1 losses per hour
          | wake at 1573.66
        at 1574 timer | lost: worker 0: silent for 1.57e+03 s, at a median round trip of 2 s and 0.1 losses per hour
          | wake at 3141.66
        at 3000 w1.1 arrives | drop w1.1 stale 3 (its worker had been declared lost); compute w1.2 on v3
          | wake at 4251.87
    """
    play(asp(), 2, script, failure_detector=RoundTripFailureDetector())


def test_a_derived_timeout_is_at_least_ten_seconds():
    script = """
        at 0.001 w0.1 arrives | worker_timeout: 10 s, at a median round trip of 0.001 s and 0.1 losses per hour
          | wake at 10
          | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        at 10 timer | lost: worker 1: silent for 10 s, at a median round trip of 0.001 s and 0.1 losses per hour
          | wake at 10.001
    """
    play(asp(), 2, script, failure_detector=RoundTripFailureDetector())


def test_a_loss_counts_for_the_timeout_and_a_false_alarm_does_not():
    silent = """
        at 60 w0.1 arrives | accept w0.1; apply v1 = w0.1 (quorum of 1 reached); compute w0.2 on v1
        at 60000 timer | lost: worker 1: silent for 5.69e+04 s, at a median round trip of 60 s and 0.1 losses per hour
          | lost: worker 0: silent for 5.69e+04 s, at a median round trip of 60 s and 0.1 losses per hour
    """
    detector = RoundTripFailureDetector()
    play(asp(), 2, silent, failure_detector=detector)
    assert detector.describe(1).endswith("0.1 losses per hour")
    detector = RoundTripFailureDetector()
    play(asp(), 2, silent + "w1 is lost |", failure_detector=detector)  # its connection is closed, at last
    assert detector.describe(1).endswith("0.6 losses per hour")


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


def test_a_run_ends_when_every_worker_is_lost_and_none_rejoins():
    script = """
        begin       | protocol: asp: the run begins; compute w0.1 on v0; wake at 5
        at 5 timer  | lost: worker 0: silent for worker_timeout_s = 5 s; wake at 10
        at 10 timer | stop no_workers: every worker is lost, and none has come back
    """
    play(asp(), 1, script, worker_timeout_s=5.0)
