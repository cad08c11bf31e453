"""Gain by unequal shares."""

from random import Random

import pytest

from paceline.recording.timed_updates import TimedUpdate
from paceline.shares.gain import Gain, clock


def gain_of(times, shares=((8, 8), (10, 6)), count=10):
    """Return the gain of updates with these shares in turn; `times` gives the seconds of a rank for some samples."""
    gain = Gain()
    for samples in shares:
        for _ in range(count):
            now_s, seconds = 2.0 * gain.updates, [times(rank, each) for rank, each in enumerate(samples)]
            gain.add(
                TimedUpdate(
                    began_s=now_s,
                    ended_s=now_s + max(seconds) + 0.5,
                    ranks=range(2),
                    samples=samples,
                    seconds=seconds,
                    work=samples,
                    equal_work=[8, 8],
                )
            )
    return gain


def test_the_time_with_equal_shares_is_that_of_the_slowest_rank():
    gain = gain_of(lambda rank, samples: 0.1 * (rank + 1) * samples)
    assert gain.updates == 20
    assert gain.seconds == pytest.approx(10 * 2.1 + 10 * 1.7)
    unknown_s = 2 * (1.6 - 1.2)  # of the first updates after the change, whose costs are not known yet
    assert gain.equal_s == pytest.approx(20 * 2.1 - unknown_s)
    assert str(gain) == "20 updates in 0:38; with equal shares 0:41 (1.08 x)"


def test_time_that_does_not_depend_on_the_samples_is_no_gain():
    assert gain_of(lambda rank, samples: 1.0 + rank, [(8, 8), (15, 1)], 100).ratio == pytest.approx(1.0)


def test_a_fixed_part_of_the_time_stays():
    gain = gain_of(lambda rank, samples: 1.0 + 0.1 * (rank + 1) * samples, [(8, 8), (10, 6)], 1000)
    assert gain.equal_s == pytest.approx(2000 * 3.1, rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_gain(seed):
    draw = Random(seed)
    shares = [(8, 8), (12, 4), (15, 1), (12, 4), (8, 8)]
    assert gain_of(lambda rank, samples: draw.lognormvariate(0, 0.5), shares, 40).ratio < 1.5


def test_a_rank_that_becomes_slow_later_is_measured_by_its_own_change():
    gain, shares = Gain(), [(8, 8)] * 10 + [(8, 8)] * 3 + [(11, 5)] * 100
    for number, samples in enumerate(shares):
        seconds = [0.1 * samples[0], (0.1 if number < 10 else 0.2) * samples[1]]
        gain.add(
            TimedUpdate(
                began_s=0.0,
                ended_s=max(seconds),
                ranks=range(2),
                samples=samples,
                seconds=seconds,
                work=samples,
                equal_work=[8, 8],
            )
        )
    assert gain.equal_s == pytest.approx(10 * 0.8 + 103 * 1.6, rel=0.02)


def test_an_update_without_all_times_would_have_taken_as_long():
    gain = Gain()
    gain.add(
        TimedUpdate(
            began_s=0.0,
            ended_s=2.0,
            ranks=range(2),
            samples=[12, 4],
            seconds=[1.0, 0.0],
            work=[12, 4],
            equal_work=[8, 8],
        )
    )
    assert (gain.updates, gain.seconds, gain.equal_s, gain.ratio) == (1, 2.0, 2.0, 1.0)


def test_work_other_than_samples_counts():
    gain = Gain()
    gain.add(
        TimedUpdate(
            began_s=0.0,
            ended_s=2.0,
            ranks=range(2),
            samples=[8, 8],
            seconds=[1.0, 1.0],
            work=[50.0, 50.0],
            equal_work=[90.0, 10.0],
        )
    )
    assert gain.equal_s == pytest.approx(2.0 + 1.8 - 1.0)


def test_a_duration_is_rounded_to_seconds():
    assert [clock(each) for each in (0.4, 59.6, 3599.5, 36000)] == ["0:00", "1:00", "1:00:00", "10:00:00"]
