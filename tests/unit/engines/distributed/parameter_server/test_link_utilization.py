"""How busy a server's link is: against a simulation of it, and what is told."""

from statistics import median_high

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.distributed.parameter_server.link_utilization import (
    BUSIEST,
    LinkMonitor,
    link_utilization,
    recommended_shards,
)

SECONDS = st.floats(1e-3, 1e2)
BYTES = st.integers(1, 10**12)


@given(n=st.integers(1, 300), nbytes=BYTES, compute_s=SECONDS, bytes_per_s=st.floats(1e6, 1e11))
def test_the_recommended_shards_are_the_fewest_that_are_busy_for_half_of_the_time(n, nbytes, compute_s, bytes_per_s):
    shards = recommended_shards(n, nbytes, compute_s, bytes_per_s)
    # A shard moves its part of the bytes; the worker has them all when it has every shard's part, at the same time.
    assert 1 <= shards <= n
    if shards < n:
        assert link_utilization(n, nbytes / shards, compute_s, bytes_per_s) <= BUSIEST * (1 + 1e-9)
    if shards > 1:
        assert link_utilization(n, nbytes / (shards - 1), compute_s, bytes_per_s) >= BUSIEST * (1 - 1e-9)


@pytest.mark.parametrize("n", [1, 3, 9])
def test_the_share_is_that_of_workers_who_take_turns(n):
    compute_s, moving_s, rounds = 10.0, 1.0, 50
    free_s = 0.0
    busy_s = 0.0
    ready = [worker * moving_s for worker in range(n)]  # each asks for the link in its turn
    for _ in range(rounds):
        for worker in range(n):
            begun_s = max(free_s, ready[worker])
            free_s = begun_s + moving_s  # its version goes out
            busy_s += moving_s
            ready[worker] = free_s + compute_s + moving_s  # and its gradient comes back, the other way
    ends_s = ready[0]
    assert busy_s / ends_s == pytest.approx(link_utilization(n, 1, compute_s, 1.0), rel=0.05)


def test_it_is_told_once_when_most_workers_have_been_heard():
    monitor = LinkMonitor(4, [2_000_000], None)
    heard = ((0, 0.1, 0.01), (2, 0.1, 0.02), (0, 9.0, 1.0), (1, 0.2, 0.04), (3, 0.1, 0.04))
    said = [monitor.on_gradient(*gradient) for gradient in heard]
    assert said[:3] == [None] * 3
    share = link_utilization(4, 2_000_000, 0.2, 400e6)
    assert said[3] == (
        f"server link about {share:.0%} busy, shards=1 is enough (now 1): 4 workers, "
        "2 MB per gradient in each direction, 0.2 s to compute one, 400 MB/s measured"
    )
    assert said[4] is None
    assert monitor.final_report() is None


@given(st.lists(SECONDS, min_size=1, max_size=9))
def test_what_is_told_is_the_median_of_all_workers_though_the_slow_ones_have_not_been_heard(times):
    monitor = LinkMonitor(len(times), [1000], 1e6)
    said = [monitor.on_gradient(worker, times[worker], 1.0) for worker in np.argsort(times)]
    told = f"{median_high(times):.3g} s to compute one"
    assert [told in text for text in said if text] == [True]
    assert said.index(next(filter(None, said))) == len(times) // 2


def test_a_worker_that_dies_before_it_is_heard_is_not_waited_for():
    monitor = LinkMonitor(3, [1000], 1e6)
    assert monitor.on_gradient(2, 0.1, 1.0) is None
    assert monitor.on_lost(2) is None  # it has been heard
    assert monitor.on_lost(0) is None
    assert "0.1 s to compute one" in monitor.on_lost(1)
    monitor = LinkMonitor(3, [1000], 1e6)
    assert [monitor.on_lost(worker) for worker in range(3)] == [None] * 3
    assert monitor.final_report() is None


def test_workers_that_are_never_heard_because_they_are_always_interrupted_are_not_waited_for():
    monitor = LinkMonitor(5, [1000], 1e6)
    said = [monitor.on_gradient(0, 0.1, 1.0) for _ in range(20)]
    assert said[:19] == [None] * 19
    assert "5 workers" in said[19]


def test_it_is_told_at_the_end_of_a_short_run():
    monitor = LinkMonitor(5, [1000], 1e6)
    monitor.on_gradient(0, 0.1, 1.0)
    assert "5 workers" in monitor.final_report()
    assert monitor.final_report() is None


def test_a_link_that_is_too_slow_is_said_to_need_shards():
    said = LinkMonitor(1, [8_000_000], 1e6).on_gradient(0, 1.0, 0.01)
    assert "47% busy" in said
    monitor = LinkMonitor(2, [8_000_000], 1e6)
    monitor.on_gradient(0, 1.0, 0.01)
    said = monitor.on_gradient(1, 1.0, 0.01)
    assert "94% busy" in said
    assert "shards=2 recommended (now 1)" in said
    assert said.endswith("1 MB/s given")


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        ([5_000_000, 3_000_000], "shards=4 recommended (now 2)"),
        ([2_000_000] * 4, "shards=4 is enough (now 4)"),
        ([1_000_000] * 8, "shards=4 is enough (now 8)"),
    ],
)
def test_with_shards_the_largest_one_makes_the_busiest_link(shards, expected):
    monitor = LinkMonitor(4, shards, 1e6)
    *_, said = (monitor.on_gradient(worker, 12.0, 1.0) for worker in range(3))
    share = link_utilization(4, max(shards), 12.0, 1e6)
    assert said.startswith(f"busiest link of {len(shards)} servers about {share:.0%} busy, {expected}: ")
    assert "4 workers, 8 MB per gradient in each direction" in said


def test_the_bandwidth_of_a_short_transfer_is_not_guessed():
    monitor = LinkMonitor(2, [2600], None)
    assert [monitor.on_gradient(worker, 0.001, 0.001) for worker in range(2)] == [None, None]
    assert monitor.final_report() is None
    assert not monitor.is_bottleneck
