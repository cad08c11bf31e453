"""Gain by unequal shares."""

import pytest

from paceline.recording.timed_updates import TimedUpdate
from paceline.shares.gain import Gain, clock


def test_the_time_with_equal_shares_is_that_of_the_slowest_rank():
    gain = Gain()
    for number in range(10):
        # 0.1 s a sample and 0.2 s on the slow rank, shares 10 and 6, and 0.5 s of sums
        gain.add(TimedUpdate(2.0 * number, 2.0 * number + 2, range(2), [10, 6], [1.0, 1.2], [10, 6], [8, 8]))
    assert gain.updates == 10
    assert gain.seconds == 20.0
    assert gain.equal_s == pytest.approx(10 * (2.0 + 1.6 - 1.2))
    assert str(gain) == "10 updates in 0:20; with equal shares 0:24 (1.20 x)"


def test_an_update_without_all_times_would_have_taken_as_long():
    gain = Gain()
    gain.add(TimedUpdate(0.0, 2.0, range(2), [12, 4], [1.0, 0.0], [12, 4], [8, 8]))
    assert (gain.updates, gain.seconds, gain.equal_s, gain.ratio) == (1, 2.0, 2.0, 1.0)


def test_work_other_than_samples_counts():
    gain = Gain()
    gain.add(TimedUpdate(0.0, 2.0, range(2), [8, 8], [1.0, 1.0], [50.0, 50.0], [90.0, 10.0]))
    assert gain.equal_s == pytest.approx(2.0 + 1.8 - 1.0)


def test_a_duration_is_rounded_to_seconds():
    assert [clock(each) for each in (0.4, 59.6, 3599.5, 36000)] == ["0:00", "1:00", "1:00:00", "10:00:00"]
