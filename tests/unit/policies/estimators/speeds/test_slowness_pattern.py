"""The pattern of slowness: every pattern of the comparison with DDP is found again in its own simulated times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.policies.estimators.speeds.slowness_pattern import slowness_pattern
from papers.ddp.patterns import PATTERNS
from selections import parametrize_few


def times_of(cluster, seed, draws=320):
    trips = cluster.round_trips(seed)
    times_s = []
    for worker in range(cluster.n):
        now, own = 0.0, []
        for draw in range(1, draws + 1):
            own.append(trips.times(worker, draw, now).compute_s)
            now += own[-1]
        times_s.append(own)
    return times_s


@parametrize_few("n", [4, 8, 32], keep=1)
@pytest.mark.parametrize("pattern", [name for name, about in PATTERNS.items() if not about.dies])
def test_every_pattern_is_found_in_its_own_times(pattern, n):
    for seed in range(3):
        assert slowness_pattern(times_of(PATTERNS[pattern].cluster(n), seed)) == pattern


def test_times_that_vary_much_do_not_make_a_worker_slow():
    for seed in range(5):
        assert slowness_pattern(times_of(pl.Cluster(8, pl.timing.Exponential(1.0)), seed, draws=50)) == "transient"


@given(st.lists(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=20), min_size=1, max_size=8), st.floats(0.01, 100))
def test_the_unit_of_time_and_the_order_of_workers_do_not_matter(times_s, factor):
    factor = 2.0 ** round(factor / 20)  # a power of two: products are exact
    scaled = [[factor * time for time in own] for own in reversed(times_s)]
    assert slowness_pattern(scaled) == slowness_pattern(times_s)


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        ([[1.0], [1.19]], "none"),
        ([[1.0], [1.21]], "half"),
        ([[1.0], [1.0], [2.82]], "half"),
        ([[1.0], [1.0], [2.84]], "quarter"),
        ([[1.0], [1.0], [1.0], [2.0], [2.0]], "ladder"),
        ([[1.0]] * 6 + [[2.0]] * 2, "half"),
        ([[1.0] * 98 + [2.0]], "transient"),
        ([[1.0] * 200 + [2.0]], "none"),
        ([[1.0] * 98 + [2.0, 2.0]], "rotating"),
        ([[1.0] * 50 + [2.0] + [1.0] * 48 + [2.0]], "transient"),
        ([[1.0] * 98 + [1.59]], "none"),
    ],
)
def test_limits(times_s, expected):
    assert slowness_pattern(times_s) == expected


@pytest.mark.parametrize("times_s", [[], [[1.0], []]])
def test_workers_without_times_are_refused(times_s):
    with pytest.raises(pl.UsageError, match="at least one"):
        slowness_pattern(times_s)
