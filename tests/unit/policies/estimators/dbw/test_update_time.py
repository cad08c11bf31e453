"""The duration estimator against problem (17) written out, against brute force, and against itself from scratch."""

import json
from fractions import Fraction
from functools import cache
from heapq import heappop, heappush
from itertools import product

import clarabel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from paceline.checkpoint.codec import decode, encode
from paceline.errors import UsageError
from paceline.policies.estimators.dbw.update_time import UpdateTimeEstimator
from selections import parametrize_few

# Means of the time that 16 workers with exponential round trips of mean 1 s need for k gradients if k is waited for
# every time (Push & Wait), by long simulations.
EXPECTED_S = [0.294, 0.448, 0.569, 0.677, 0.779, 0.880, 0.982, 1.089, 1.203, 1.329, 1.470, 1.637, 1.842, 2.115, 2.530]
EXPECTED_S.append(3.381)


@cache
def constraints(n):
    """Return the pairs (a, b) of cells with x_a <= x_b, as problem (17) lists them."""
    ranks = range(1, n + 1)
    along_rows = [((h, k), (h, k + 1)) for h in ranks for k in ranks[:-1]]
    across_rows = [((h + 1, k), (h, k)) for h in ranks[:-1] for k in ranks]
    diagonal = [((k, k), (k + 1, k + 1)) for k in ranks[:-1]]
    return along_rows + across_rows + diagonal


def cells_of(n):
    return list(product(range(1, n + 1), repeat=2))


class Samples:
    """All samples, and what each weighs, by the words of the docstring."""

    def __init__(self, n, window=None, forgetting=1.0):
        self.n, self.window, self.forgetting = n, window, forgetting
        self.kept = []

    def add(self, *sample):
        self.kept.append(sample)

    def resize(self, n):
        self.n = n
        self.kept = [(version, min(h, n), i, t_s) for version, h, i, t_s in self.kept if i <= n]

    def weighed(self):
        """Return the weight and the mean of each cell that counts, the weights as fractions."""
        newest = max((version for version, *_ in self.kept), default=0)
        sums = {}
        for version, h, i, t_s in self.kept:
            if self.window is None or version > newest - self.window:
                weight = Fraction(self.forgetting) ** (newest - version)
                weights, total = sums.get((h, i), (0, 0))
                sums[h, i] = weights + weight, total + weight * Fraction(t_s)
        return {cell: (weight, total / weight) for cell, (weight, total) in sums.items()}


def random_samples(rng, n, forgetting):
    """Return samples of some cells: any times, few different ones, the same everywhere, or all 0."""
    samples = Samples(n, forgetting=forgetting)
    draw = [rng.exponential, lambda: rng.integers(3), lambda: 0.7, lambda: 0.0][rng.integers(4)]
    share = rng.uniform(0.2, 1)
    for cell in cells_of(n):
        while rng.random() < share:
            samples.add(int(rng.integers(10)), *cell, float(draw()))
    return samples


def estimator(samples, **options):
    durations = UpdateTimeEstimator(samples.n, window=samples.window, forgetting=samples.forgetting, **options)
    for sample in samples.kept:
        durations.add(*sample)
    return durations


def objective(weighed, x):
    return float(sum(weight * (mean - Fraction(x[cell])) ** 2 for cell, (weight, mean) in weighed.items()))


def solve_literally(n, weighed, pinned=None):
    """Return all x of problem (17), by Clarabel, with one of them pinned to a value if asked for."""
    at = {cell: index for index, cell in enumerate(cells_of(n))}
    rows = [{at[low]: 1.0, at[high]: -1.0} for low, high in constraints(n)]
    cones = [clarabel.NonnegativeConeT(len(rows))] if rows else []
    bounds = [0.0] * len(rows)
    if pinned:
        rows.append({at[pinned[0]]: 1.0})
        bounds.append(pinned[1])
        cones.append(clarabel.ZeroConeT(1))
    if not rows:
        return {cell: float(mean) for cell, (_, mean) in weighed.items()}
    entries = [(row, column, value) for row, entry in enumerate(rows) for column, value in entry.items()]
    A = sparse.csc_matrix(
        ([value for *_, value in entries], ([r for r, *_ in entries], [c for _, c, _ in entries])), (len(rows), len(at))
    )
    weights = np.array([float(weighed.get(cell, (0, 0))[0]) for cell in at])
    means = np.array([float(weighed.get(cell, (0, 0))[1]) for cell in at])
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    P = sparse.diags(2 * weights).tocsc()
    solution = clarabel.DefaultSolver(P, -2 * weights * means, A, np.array(bounds), cones, settings).solve()
    return dict(zip(at, solution.x, strict=True))


def bounds_of(n, x):
    """Return the least and the greatest value that each cell may have, from those of some cells."""
    least = {cell: x.get(cell, -np.inf) for cell in cells_of(n)}
    most = {cell: x.get(cell, np.inf) for cell in cells_of(n)}
    for _ in range(3 * n):
        for low, high in constraints(n):
            least[high] = max(least[high], least[low])
            most[low] = min(most[low], most[high])
    return least, most


@pytest.mark.parametrize("forgetting", [1.0, 0.1])  # 10 versions: weights up to 10^9 times the smallest
@parametrize_few("seed", range(40), keep=8)
def test_the_solution_is_at_least_as_good_as_that_of_a_solver(seed, forgetting):
    rng = np.random.default_rng(seed)
    samples = random_samples(rng, int(rng.integers(1, 9)), forgetting)
    durations, weighed = estimator(samples), samples.weighed()
    ours, theirs = durations.fitted(), solve_literally(samples.n, weighed)
    least, most = bounds_of(samples.n, ours)
    assert all(least[cell] == ours[cell] == most[cell] for cell in weighed)  # no constraint is violated
    estimate = durations.estimate()
    assert estimate.lower.tolist() == [max(least[k, k], 0) for k in range(1, samples.n + 1)]
    assert estimate.upper.tolist() == [most[k, k] for k in range(1, samples.n + 1)]
    best = objective(weighed, theirs)
    assert objective(weighed, ours) <= best + 1e-9  # it violates constraints by as much
    # The objective is strongly convex, so that the two cannot be further apart than this:
    apart = sum(float(weight) * (ours[cell] - theirs[cell]) ** 2 for cell, (weight, _) in weighed.items())
    assert apart <= best - objective(weighed, ours) + 1e-9


@cache
def upper_sets(n):
    """Return all sets of cells that hold, with a cell, all that are above it."""
    cells = cells_of(n)
    sets = (
        frozenset(c for c, is_in in zip(cells, chosen, strict=True) if is_in)
        for chosen in product((0, 1), repeat=n * n)
    )
    return [each for each in sets if all(high in each or low not in each for low, high in constraints(n))]


def solve_by_brute_force(n, weighed):
    """Return x_c = max over upper sets U with c of min over lower sets L with c of the mean over both, in fractions."""
    x, means = {}, {}
    for upper, other in product(upper_sets(n), repeat=2):
        both = [cell for cell in weighed if cell in upper and cell not in other]
        if both:
            total = sum(weighed[cell][0] for cell in both)
            means[upper, other] = sum(weighed[cell][0] * weighed[cell][1] for cell in both) / total
    for cell in weighed:
        x[cell] = max(
            min(means[upper, other] for other in upper_sets(n) if cell not in other)
            for upper in upper_sets(n)
            if cell in upper
        )
    return x


@pytest.mark.parametrize("forgetting", [1.0, 0.1])
@pytest.mark.parametrize("seed", range(20))
def test_the_solution_equals_brute_force_in_exact_arithmetic(seed, forgetting):
    rng = np.random.default_rng(seed)
    samples = random_samples(rng, int(rng.integers(2, 4)), forgetting)
    ours, exact = estimator(samples).fitted(), solve_by_brute_force(samples.n, samples.weighed())
    assert ours == pytest.approx({cell: float(value) for cell, value in exact.items()}, rel=1e-9, abs=1e-12)


@parametrize_few("seed", range(12), keep=4)
def test_every_value_of_the_interval_is_optimal_and_no_other(seed):
    rng = np.random.default_rng(seed)
    samples = Samples(4)
    for cell in cells_of(4):
        if rng.random() < 0.5:
            samples.add(0, *cell, float(rng.exponential()))
    weighed, estimate = samples.weighed(), estimator(samples).estimate()
    best = objective(weighed, estimator(samples).fitted())
    for k in range(1, 5):
        low, high = estimate.lower[k - 1], min(estimate.upper[k - 1], 10.0)
        for inside in (low, (low + high) / 2, high):
            pinned = solve_literally(4, weighed, ((k, k), inside))
            assert objective(weighed, pinned) == pytest.approx(best, abs=1e-7)
        for outside in [low - 0.2] * int(low > 0) + [high + 0.2] * int(high < 10):
            pinned = solve_literally(4, weighed, ((k, k), outside))
            assert objective(weighed, pinned) > best + 1e-3


def saved_and_loaded(durations):
    """Return a new estimator with the state of another, after its way through a file."""
    again = UpdateTimeEstimator(1, window=durations.window, forgetting=durations.forgetting)
    again.load_state_dict(decode(json.loads(json.dumps(encode(durations.state_dict(), {}))), {}))
    return again


times_s = st.one_of(st.floats(0, 10), st.integers(0, 2).map(float))
batches = st.lists(
    st.tuples(
        st.integers(1, 6),  # workers from now on, in case they change
        st.booleans(),  # whether they change
        st.integers(0, 3),  # versions made meanwhile
        st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), st.integers(0, 5), times_s), max_size=12),
    ),
    max_size=8,
)


@pytest.mark.slow
@given(batches, st.sampled_from([None, 1, 4]), st.sampled_from([1.0, 0.5]))
def test_incremental_repair_equals_a_full_solve_and_a_restored_state_is_bit_identical(batches, window, forgetting):
    samples = Samples(4, window, forgetting)
    durations, resumed = estimator(samples), estimator(samples)
    version = 0
    for n, is_resized, versions, batch in batches:
        if is_resized:
            for each in (samples, durations, resumed):
                each.resize(n)
        version += versions
        for late, h, i, t_s in [(0, 0, 0, 1.0), *batch]:
            for each in (samples, durations, resumed):
                each.add(max(version - late, 0), h % samples.n + 1, i % samples.n + 1, t_s)
        resumed = saved_and_loaded(resumed)
        assert resumed.fitted() == durations.fitted() == pytest.approx(estimator(samples).fitted(), rel=1e-9, abs=1e-9)
    weighed = samples.weighed()
    if weighed:
        best = objective(weighed, solve_literally(samples.n, weighed))
        assert objective(weighed, durations.fitted()) <= best + 1e-6


def test_a_window_drops_old_samples_and_accepts_no_older_ones():
    durations = UpdateTimeEstimator(2, window=2)
    for version, t_s in enumerate([8.0, 1.0, 3.0]):
        durations.add(version, 2, 2, t_s)
    assert durations.estimate().times.tolist() == [0.0, 2.0]
    durations.add(0, 2, 2, 8.0)
    assert durations.estimate().times.tolist() == [0.0, 2.0]
    durations.add(9, 1, 1, 1.0)
    assert durations.fitted() == {(1, 1): 1.0}


def test_weights_stay_finite_over_a_million_versions():
    durations = UpdateTimeEstimator(2, forgetting=0.9)
    durations.add(0, 1, 1, 6.0)
    for version in range(0, 1_000_000, 20):
        durations.add(version, 2, 1, 3.0)
        durations.add(version, 2, 2, 3.0 + version % 3 / 4)
    fitted = durations.fitted()
    assert fitted[2, 1] == 3.0
    assert 3.0 <= fitted[1, 1] <= fitted[2, 2] < 4.0  # the 6 s of the first version hardly count any more
    weights = [weight for _, _, weight, _ in durations.state_dict()["fit"]["cells"]]
    assert 0 < min(weights) <= max(weights) < 1e13


@pytest.mark.slow
def test_the_discount_follows_its_formula_over_hundreds_of_versions():
    samples = Samples(2, forgetting=0.5)
    durations, resumed = estimator(samples), estimator(samples)
    rng = np.random.default_rng(0)
    for version in range(0, 200, 3):
        for late, (h, i) in zip(rng.integers(4, size=4), cells_of(2), strict=True):
            sample = (max(version - int(late), 0), h, i, float(rng.exponential()))
            for each in (samples, durations, resumed):
                each.add(*sample)
        resumed = saved_and_loaded(resumed)
        assert resumed.fitted() == durations.fitted()
        weighed = samples.weighed()
        assert durations.fitted() == pytest.approx(solve_by_brute_force(2, weighed), rel=1e-9)


def push_and_wait(n, choose, updates, seed=0):
    """Feed an estimator's samples of Push & Wait with exponential round trips; choose(version) gives the quorums."""
    rng = np.random.default_rng(seed)
    begun_s, quorums, arrived, idle, now_s = [], [n], [], n, 0.0
    at_work = []
    for version in range(updates):
        begun_s.append(now_s)
        arrived.append(0)
        for round_trip_s in rng.exponential(size=idle):
            heappush(at_work, (now_s + round_trip_s, version))
        quorums.append(choose())
        idle = 0
        while idle < quorums[-1]:
            now_s, of = heappop(at_work)
            arrived[of] += 1
            yield of, quorums[of], arrived[of], now_s - begun_s[of]
            idle += of == version
            if of < version:
                heappush(at_work, (now_s + rng.exponential(), version))


def check_constant_quorum(k):
    durations = UpdateTimeEstimator(16)
    for sample in push_and_wait(16, lambda: k, updates=2000):
        durations.add(*sample)
    assert durations.estimate().times[k - 1] == pytest.approx(EXPECTED_S[k - 1], rel=0.03)


@parametrize_few("k", [1, 8, 16], keep=1)
def test_the_time_of_a_constant_quorum_is_estimated_within_three_percent(k):
    check_constant_quorum(k)


@pytest.mark.slow
@pytest.mark.parametrize("k", range(1, 17))
def test_the_time_of_every_constant_quorum_is_estimated_within_three_percent(k):
    check_constant_quorum(k)


@pytest.mark.parametrize(("unobserved", "visits"), [("lower", 1), ("upper", 200)])
def test_an_optimistic_estimator_leaves_the_full_quorum_and_a_pessimistic_one_stays(unobserved, visits):
    durations = UpdateTimeEstimator(16, unobserved)
    chosen = []

    def choose():
        times = durations.estimate().times
        chosen.append(int(np.argmax(np.arange(1, 17) / times)) + 1 if times.any() else 16)
        return chosen[-1]

    for sample in push_and_wait(16, choose, updates=200):
        durations.add(*sample)
    assert chosen[:visits] == [16] * visits
    assert 16 not in chosen[visits : visits + 1]


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), times_s), max_size=10))
def test_the_chosen_times_lie_in_their_intervals_and_do_not_decrease(n, ranks):
    samples = Samples(n)
    for h, i, t_s in ranks:
        samples.add(0, h % n + 1, i % n + 1, t_s)
    lower, mid, upper = (estimator(samples, unobserved=rule).estimate() for rule in ("lower", "mid", "upper"))
    for each in (lower, mid, upper):
        assert np.isfinite(each.times).all()
        assert (each.times >= each.lower).all()
        assert (each.times <= each.upper).all()
        assert (np.diff(each.times) >= 0).all()
    bounded = lower.upper < np.inf
    assert (lower.times == lower.lower).all()
    assert upper.times[bounded].tolist() == upper.upper[bounded].tolist()
    assert mid.times[bounded] == pytest.approx((mid.lower + mid.upper)[bounded] / 2)


@pytest.mark.parametrize("t_s", [0.0, 1e-300, 0.1, 1e300])
def test_equal_times_are_estimated_exactly(t_s):
    durations = UpdateTimeEstimator(5, window=7, forgetting=0.9)
    for version, (h, i) in enumerate(cells_of(5)):
        durations.add(version, h, i, t_s)
        assert set(durations.fitted().values()) == {t_s}
    unlimited = UpdateTimeEstimator(5)
    for h, i in cells_of(5) * 3:
        unlimited.add(0, h, i, t_s)
    assert unlimited.estimate().times.tolist() == unlimited.estimate().upper.tolist() == [t_s] * 5


def test_without_samples_there_is_no_estimate():
    for rule in ("lower", "mid", "upper"):
        estimate = UpdateTimeEstimator(3, rule).estimate()
        assert estimate.times.tolist() == estimate.lower.tolist() == [0.0] * 3
        assert estimate.upper.tolist() == [np.inf] * 3


def test_a_state_without_samples_is_loaded():
    assert saved_and_loaded(UpdateTimeEstimator(3)).estimate().upper.tolist() == [np.inf] * 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 0}, r"n=0 is not a whole number in \[1, inf\)"),
        ({"unobserved": "uper"}, "unobserved = 'uper', expected one of lower, mid, upper"),
        ({"window": 0}, "window=0 is not a whole number"),
        ({"forgetting": 1.5}, r"forgetting=1.5 is not a number in \(0, 1\]"),
    ],
)
def test_invalid_options_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        UpdateTimeEstimator(**{"n": 4, **options})


@pytest.mark.parametrize(("h", "i", "t_s"), [(0, 1, 1.0), (5, 1, 1.0), (1, 5, 1.0), (1, 1, -1.0), (1, 1, np.nan)])
def test_invalid_samples_are_refused(h, i, t_s):
    with pytest.raises(UsageError, match="expected ranks from 1 to 4 and finite t_s >= 0"):
        UpdateTimeEstimator(4).add(0, h, i, t_s)
