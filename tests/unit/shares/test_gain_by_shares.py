"""Gain by unequal shares."""

from paceline.shares.gain import Gain


def test_the_time_with_equal_shares_is_that_of_the_slowest_rank():
    gain = Gain()
    for number in range(11):
        # 0.1 s a sample and 0.2 s on the slow rank, shares 10 and 6, and 0.5 s of sums
        gain.add(2.0 * number, [1.0, 1.2], [10, 6], [8, 8])
    assert gain.updates == 10
    assert gain.seconds == 20.0
    assert abs(gain.equal_s - 10 * (2.0 + 1.6 - 1.2)) < 1e-9
    assert gain.line() == "paceline: 10 updates in 0:20; with equal shares 0:24 (1.20 x)"


def test_updates_without_a_time_do_not_count():
    gain = Gain()
    gain.add(0.0, [1.0, 1.0], [8, 8], [8, 8])
    gain.add(2.0, [1.0, 0.0], [8, 8], [8, 8])
    assert gain.line() == ""
