"""How busy a server's link is: against a simulation of it, and what is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.distributed.link_load import BUSIEST, Survey, share_busy, slices_for

SECONDS = st.floats(1e-3, 1e2)
BYTES = st.integers(1, 10**12)


@given(n=st.integers(1, 300), nbytes=BYTES, compute_s=SECONDS, bytes_per_s=st.floats(1e6, 1e11))
def test_the_recommended_slices_are_the_fewest_that_are_busy_for_half_of_the_time(n, nbytes, compute_s, bytes_per_s):
    slices = slices_for(n, nbytes, compute_s, bytes_per_s)
    # A slice moves its part of the bytes; the worker has them all when it has every slice's part, at the same time.
    assert 1 <= slices <= n
    if slices < n:
        assert share_busy(n, nbytes / slices, compute_s, bytes_per_s) <= BUSIEST * (1 + 1e-9)
    if slices > 1:
        assert share_busy(n, nbytes / (slices - 1), compute_s, bytes_per_s) >= BUSIEST * (1 - 1e-9)


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
    assert busy_s / ends_s == pytest.approx(share_busy(n, 1, compute_s, 1.0), rel=0.05)


def test_it_is_told_once_when_every_worker_has_been_heard():
    survey = Survey(3, [2_000_000], None)
    said = [survey.hear(worker, 0.1, network_s) for worker, network_s in ((0, 0.01), (2, 0.02), (0, 1.0), (1, 0.04))]
    assert said[:3] == [None] * 3
    assert said[3] == (
        "the server's link will be busy 13% of the time: 3 workers, 2 MB each way a gradient, 0.1 s to compute it, "
        "400 MB/s measured; slices=1, as there is, will do".replace("13%", f"{3 * 0.005 / 0.11:.0%}")
    )
    assert survey.hear(1, 0.1, 0.04) is None


def test_a_link_that_is_too_slow_is_said_to_need_slices():
    said = Survey(1, [8_000_000], 1e6).hear(0, 1.0, 0.01)
    assert "47% of the time" in said
    survey = Survey(2, [8_000_000], 1e6)
    survey.hear(0, 1.0, 0.01)
    said = survey.hear(1, 1.0, 0.01)
    assert "94% of the time" in said
    assert "1 MB/s given; slices=2 would be better, there is 1" in said


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([5_000_000, 3_000_000], "slices=4 would be better, there are 2"),
        ([2_000_000] * 4, "slices=4, as there are, will do"),
        ([1_000_000] * 8, "slices=4 would do, there are 8"),
    ],
)
def test_with_slices_the_largest_one_makes_the_busiest_link(slices, expected):
    survey = Survey(4, slices, 1e6)
    for worker in range(4):
        said = survey.hear(worker, 12.0, 1.0)
    share = share_busy(4, max(slices), 12.0, 1e6)
    assert said.startswith(f"the busiest link of {len(slices)} servers will be busy {share:.0%} of the time")
    assert "4 workers, 8 MB each way a gradient" in said
    assert said.endswith(f"1 MB/s given; {expected}")
