"""Stop conditions, non-finite gradients and evaluations: events with all the commands that answer them."""

import pytest

from arrivals import arrival
from coordinator_harness import coordinator, play
from paceline.catalogue.protocols import (
    asp,
    backup,
    bsp,
    k_sync,
)
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.core.duration import Duration
from paceline.core.events import Joined, Lost


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


def test_fifty_skipped_steps_in_a_row_stop_the_run_and_a_skip_is_no_divergence():
    skips = "\n".join(
        f"w1.{i} arrives skipped | drop w1.{i} (its loop skipped the step); compute w1.{i + 1} on v0"
        for i in range(1, 50)
    )
    script = f"""
        {skips}
        w1.50 arrives skipped | drop w1.50 (its loop skipped the step)
             | stop not_finite: 50 steps in a row were skipped by the loop of worker 1, the last at update 0
             | lower the learning rate or check the data
    """
    assert play(asp(), 2, script).stopped


def test_an_accepted_gradient_resets_the_count_of_skipped_steps():
    script = (
        "\n".join(
            f"w0.{i} arrives skipped | drop w0.{i} (its loop skipped the step); compute w0.{i + 1} on v0"
            for i in range(1, 50)
        )
        + """
        w0.50 arrives         | accept w0.50; apply v1 = w0.50 (quorum of 1 reached); compute w0.51 on v1
        w0.51 arrives skipped | drop w0.51 (its loop skipped the step); compute w0.52 on v1
    """
    )
    assert not play(asp(), 1, script).stopped


def test_an_accepted_gradient_resets_the_count_of_non_finite_ones():
    driven = coordinator(asp(), 1)
    driven.begin()
    for draw in range(1, 40):
        driven.handle(arrival(draw, 0, draw, finite=draw % 10 == 0))
    assert not driven.stopped


def test_a_rejoin_resets_the_count_of_non_finite_gradients():
    driven = coordinator(asp(), 2)
    driven.begin()
    for draw in range(1, 19):
        if draw == 10:
            driven.handle(Lost(draw - 0.5, 0, "unplugged"))
            driven.handle(Joined(draw - 0.5, 0))
        driven.handle(arrival(draw, 0, draw + (draw >= 10), finite=False))
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
        driven.handle(arrival(draw - 0.5, 0, draw - 1, loss=0.0))  # an old draw does not count
        commands = driven.handle(arrival(draw, 0, draw, loss=loss))
    assert driven.stopped
    mean = sum(losses[1:]) / window
    assert commands[-1] == ("loss", f"mean loss {mean:.6g} reached the target 0.5")


def test_a_loss_at_the_target_stops_when_the_window_is_full():
    driven = coordinator(asp(), 1, stop={"loss": 0.5})
    driven.begin()
    for draw in range(1, 11):
        assert not driven.stopped
        driven.handle(arrival(draw, 0, draw, loss=0.5))
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
