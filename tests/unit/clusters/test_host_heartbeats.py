"""Heartbeats of hosts: a host is silent while a rank of it counts as living."""

from paceline.clusters.host_heartbeats import SILENCE_S, HostHeartbeats


def test_the_silence_of_a_host_begins_anew_when_a_rank_is_back():
    heartbeats = HostHeartbeats()

    def silent(living, now):
        return heartbeats.silent({1: 5}, living, now * SILENCE_S)

    assert [silent([1], 0.0), silent([1], 1.0)] == [[], [1]]
    assert silent([], 2.0) == []  # its ranks are lost
    assert [silent([1], 2.9), silent([1], 3.0)] == [[], [1]]


def test_a_heartbeat_ends_the_silence():
    heartbeats = HostHeartbeats()
    assert heartbeats.silent({1: 5}, [1], 0.0) == heartbeats.silent({1: 6}, [1], SILENCE_S) == []
    assert heartbeats.silent({1: 6}, [1], 2 * SILENCE_S) == [1]
