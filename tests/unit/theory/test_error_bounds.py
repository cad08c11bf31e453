"""Bounds on the error against SGD itself, many runs at a time, and against closed forms."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.theory import (
    Constants,
    async_error,
    async_floor,
    max_learning_rate,
    mean_squared_gradient,
    staleness_constant,
    sync_error,
    sync_floor,
    tradeoff,
    variable_rate_error,
    variable_rate_floor,
)
from selections import parametrize_few

RUNS = 2_000


def stale_sgd(gradient, w_0, eta, k, n, updates, sigma2, seed=0):
    """Return the parameters before each update and those its gradients are of, [updates + 1, RUNS, (k,) dim].

    K-async with exponential times: any k of the n workers come next. K = n is synchronous.
    """
    rng = np.random.default_rng(seed)
    w = np.tile(w_0, (RUNS, 1))
    read = np.tile(w_0, (RUNS, n, 1))
    path, used = [], []
    for _ in range(updates + 1):
        who = np.argsort(rng.random((RUNS, n)), axis=1)[:, :k, None]
        stale = np.take_along_axis(read, who, axis=1)
        path.append(w)
        used.append(stale)
        noise = rng.normal(scale=(sigma2 / len(w_0)) ** 0.5, size=stale.shape)
        w = w - eta * (gradient(stale) + noise).mean(axis=1)
        np.put_along_axis(read, who, w[:, None], axis=1)
    return np.array(path), np.array(used)


def squared(v):
    """Return the mean over runs of the squared norm, before each update."""
    return (v**2).sum(-1).mean(tuple(range(1, v.ndim - 1)))


def staleness_ratio(gradient, path, used):
    """Return the smallest gamma for which the assumption of Theorem 3 holds in these runs."""
    return float((squared(gradient(used) - gradient(path)[:, :, None]) / squared(gradient(path))).max())


CURVATURES = np.array([1.0, 0.3])
W_0 = np.array([2.0, -2.0])
SIGMA2 = 0.4


def gradient_of_bowl(w):
    return CURVATURES * w


def bowl(gamma=0.0):
    return Constants(L=1.0, c=0.3, sigma2=SIGMA2, initial_error=float(CURVATURES @ W_0**2) / 2, gamma=gamma)


def error_of_bowl(path):
    return (CURVATURES * path**2).sum(-1).mean(1) / 2


# -- Lemma 2


def test_fresh_gradients_on_a_round_bowl_follow_their_recursion_below_the_bound():
    # F = c ||w||**2 / 2: the error is (1 - eta c)**2 times the one before, and eta**2 c sigma2 / (2 k).
    c, eta, k, sigma2, updates = 0.8, 0.4, 3, 0.5, 40
    path, _ = stale_sgd(lambda w: c * w, W_0, eta, k, k, updates, sigma2)
    errors = c / 2 * squared(path)
    shrinks, floor = (1 - eta * c) ** 2, eta**2 * c * sigma2 / (2 * k) / (1 - (1 - eta * c) ** 2)
    closed = floor + shrinks ** np.arange(updates + 1) * (errors[0] - floor)
    assert errors == pytest.approx(closed, rel=0.1)
    constants = Constants(L=c, c=c, sigma2=sigma2, initial_error=errors[0])
    bound = sync_error(constants, eta, k, np.arange(updates + 1.0))
    assert np.all(closed[1:] < bound[1:])
    # In the floor the bound is (2 - eta c) times the truth, in the rate it has 1 - eta c for its square.
    assert sync_floor(constants, eta, k) == pytest.approx((2 - eta * c) * floor)


@parametrize_few("k", [1, 4], keep=1)
def test_fresh_gradients_on_a_bowl_stay_below_lemma_2(k):
    eta = max_learning_rate(bowl(), k)
    path, _ = stale_sgd(gradient_of_bowl, W_0, eta, k, k, 60, SIGMA2)
    assert np.all(error_of_bowl(path)[1:] < sync_error(bowl(), eta, k, np.arange(1.0, 61.0)))


def test_fresh_gradients_are_bounded_by_theorem_3_as_well_and_closer():
    path, _ = stale_sgd(gradient_of_bowl, W_0, 0.4, 2, 2, 60, SIGMA2)
    j = np.arange(1.0, 61.0)
    closer = async_error(bowl(), 0.4, 2, 1.0, j)
    assert np.all(error_of_bowl(path)[1:] < closer)
    assert np.all(closer < sync_error(bowl(), 0.4, 2, j))


# -- Theorem 3


@parametrize_few(("k", "n", "eta"), [(1, 4, 0.05), (2, 4, 0.15), (3, 4, 0.3)], keep=1)
def test_stale_gradients_on_a_bowl_stay_below_theorem_3(k, n, eta):
    updates = 80
    path, used = stale_sgd(gradient_of_bowl, W_0, eta, k, n, updates, SIGMA2)
    gamma = staleness_ratio(gradient_of_bowl, path, used)
    assert 0 < gamma < 1
    j = np.arange(updates + 1.0)
    errors, bound = error_of_bowl(path), async_error(bowl(gamma), eta, k, k / n, j)
    assert np.all(errors[1:] < bound[1:])
    assert bound[-1] < 0.8 * bound[0]  # it says something


def test_the_learning_rate_printed_in_theorem_3_diverges():
    # L = c = 1, M_G = 0, k = n = 8: 1 / (2 L / k) = 4 is printed, and |1 - 4| > 1.
    bowl = Constants(L=1.0, c=1.0, sigma2=0.0)
    printed = 1 / (2 * bowl.L * (bowl.M_G / 8 + 1 / 8))
    path, _ = stale_sgd(lambda w: w, W_0, printed, 8, 8, 5, 0.0)
    assert squared(path)[-1] > 1_000 * squared(path)[0]
    assert max_learning_rate(bowl, 8) == 0.5
    path, _ = stale_sgd(lambda w: w, W_0, 0.5, 8, 8, 5, 0.0)
    assert squared(path)[-1] < 0.01 * squared(path)[0]


@given(k=st.integers(1, 64), m=st.integers(1, 8), M_G=st.floats(0, 10), L=st.floats(0.1, 10), p_0=st.floats(0, 1))
def test_the_largest_learning_rate_is_the_smaller_of_two_conditions(k, m, M_G, L, p_0):
    constants = Constants(L=L, c=L, sigma2=1.0, M_G=M_G, m=m)
    most = max_learning_rate(constants, k)
    assert most == pytest.approx(min(1 / (L * constants.progress(p_0)), 1 / (2 * L * (M_G / (k * m) + 1))))
    assert async_error(constants, most, k, p_0, 0) == pytest.approx(1.0)
    with pytest.raises(pl.UsageError, match=f"at most {most:.6g}"):
        sync_error(constants, most * 1.001, k, 1)


@given(k=st.integers(1, 8), gamma=st.floats(0, 0.9), p_0=st.floats(0, 1), updates=st.integers(0, 30))
def test_theorem_3_is_its_recursion_unrolled(k, gamma, p_0, updates):
    constants = Constants(L=2.0, c=0.5, sigma2=1.3, M_G=0.7, m=3, initial_error=5.0, gamma=gamma)
    eta = max_learning_rate(constants, k)
    error = 5.0
    for _ in range(updates):
        error = (1 - eta * 0.5 * (1 - gamma + p_0 / 2)) * error + 2.0 * eta**2 * 1.3 / (2 * k * 3)
    assert async_error(constants, eta, k, p_0, updates) == pytest.approx(error)
    assert async_floor(constants, eta, k, p_0) == pytest.approx(async_error(constants, eta, k, p_0, 10_000), rel=1e-6)


# -- Theorem 4


@parametrize_few(("k", "n", "eta"), [(1, 4, 0.1), (2, 4, 0.3)], keep=1)
def test_stale_gradients_on_a_bowl_stay_below_theorem_4(k, n, eta):
    updates = 80
    path, used = stale_sgd(gradient_of_bowl, W_0, eta, k, n, updates, SIGMA2)
    C = eta * float(squared(used - path[:, :, None]).max())
    errors = error_of_bowl(path)
    for j in (1, 5, 20, 80):
        assert errors[j] < variable_rate_error(bowl(), [eta] * j, C, k / n, k)


def test_theorem_4_matches_hand_calculation():
    constants = Constants(L=2.0, c=0.5, sigma2=1.0, initial_error=3.0)
    etas, C, p_0 = [0.2, 0.1, 0.05], 0.01, 0.5
    rho = [eta * (1 + p_0 / 2) * 0.5 for eta in etas]
    delta = [C * 4 / 2 + eta**2 * 2 / 2 for eta in etas]
    by_hand = 3.0 * prod(1 - each for each in rho)
    by_hand += delta[2] + (1 - rho[2]) * delta[1] + (1 - rho[2]) * (1 - rho[1]) * delta[0]
    assert variable_rate_error(constants, etas, C, p_0) == pytest.approx(by_hand, rel=1e-12)
    assert variable_rate_error(constants, [], C, p_0) == 3.0


def test_theorem_4_with_a_constant_rate_tends_to_its_floor():
    constants = Constants(L=2.0, c=0.5, sigma2=1.0)
    found = variable_rate_error(constants, [0.1] * 2_000, 0.01, 0.25, k=2)
    assert found == pytest.approx(variable_rate_floor(constants, 0.1, 0.01, 0.25, k=2))


@given(more=st.floats(1.01, 100), eta=st.floats(1e-3, 0.25), p_0=st.floats(0, 1), k=st.integers(1, 8))
def test_the_constant_of_a_floor_leads_to_that_floor(more, eta, p_0, k):
    constants = Constants(L=2.0, c=0.5, sigma2=1.0)
    floor = more * variable_rate_floor(constants, eta, 0.0, p_0, k)
    C = staleness_constant(constants, eta, floor, p_0, k)
    assert C > 0
    assert variable_rate_floor(constants, eta, C, p_0, k) == pytest.approx(floor)


def test_a_floor_below_the_noise_is_refused():
    with pytest.raises(pl.UsageError, match=r"noise alone leaves 0.\d+; give a higher floor or a smaller eta"):
        staleness_constant(Constants(L=1.0, c=0.5, sigma2=1.0), eta=0.1, floor=0.01, p_0=0.1)


# -- Theorem 5


@parametrize_few(("k", "n"), [(1, 3), (2, 3), (3, 3)], keep=1)
def test_stale_gradients_in_waves_stay_below_theorem_5(k, n):
    # F = sum of w**2 / 2 + 0.8 cos(2 w): from -2.2 to 4.2 curved, with several minima.
    def gradient(w):
        return w - 1.6 * np.sin(2 * w)

    def value(w):
        return (w**2 / 2 + 0.8 * np.cos(2 * w)).sum(-1)

    L, sigma2, updates, start = 4.2, 0.5, 60, np.array([3.0, -2.5])
    grid = np.linspace(-3, 3, 6_001)[:, None]
    initial = float(value(start) - 2 * value(grid).min())
    eta = 0.02
    path, used = stale_sgd(gradient, start, eta, k, n, updates, sigma2)
    gamma = staleness_ratio(gradient, path, used) if k < n else 0.0
    assert gamma < 1
    constants = Constants(L=L, c=0.0, sigma2=sigma2, initial_error=initial, gamma=gamma)
    means = np.cumsum(squared(gradient(path)))[:updates] / np.arange(1, updates + 1)
    assert np.all(means < mean_squared_gradient(constants, eta, k, k / n, np.arange(1.0, updates + 1)))


# -- constants and other numbers that cannot be


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"c": 2.0}, "c=2.0 is above L=1.0"),
        ({"L": 0.0}, "L=0.0 is not a number in"),
        ({"c": -0.1}, "c=-0.1 is not a number in"),
        ({"sigma2": -1.0}, "sigma2=-1.0 is not a number in"),
        ({"M_G": -1.0}, "M_G=-1.0 is not a number in"),
        ({"m": 0}, "m=0 is not a whole number in"),
        ({"gamma": 1.1}, "gamma=1.1 is not a number in"),
        ({"initial_error": -1.0}, "initial_error=-1.0 is not a number in"),
    ],
)
def test_invalid_constants_are_refused(wrong, words):
    with pytest.raises(pl.UsageError, match=words):
        Constants(**{"L": 1.0, "c": 0.5, "sigma2": 1.0, **wrong})


CONSTANTS = Constants(L=1.0, c=0.5, sigma2=1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sync_error(CONSTANTS, 0.0, 1, 1), "eta=0.0, expected a learning rate above 0 and at most 0.5"),
        (lambda: sync_error(CONSTANTS, 0.1, 0, 1), "k=0 is not a whole number"),
        (lambda: sync_error(CONSTANTS, 0.1, 1, -1), "updates=-1, expected at least 0"),
        (lambda: async_error(CONSTANTS, 0.1, 1, 1.5, 1), "p_0=1.5 is not a number in"),
        (lambda: sync_floor(Constants(L=1.0, c=0.0, sigma2=1.0), 0.1, 1), "c=0: .* or use mean_squared_gradient"),
        (lambda: async_floor(Constants(L=1.0, c=0.5, sigma2=1.0, gamma=1.0), 0.1, 1, 0.0), "gamma=1 and p_0=0"),
        (lambda: mean_squared_gradient(CONSTANTS, 0.1, 1, 0.5, 0), "updates=0, expected at least 1"),
        (lambda: variable_rate_error(CONSTANTS, [0.1], -1.0, 0.5), "C=-1.0 is not a number in"),
        (lambda: variable_rate_error(CONSTANTS, [0.1, 0.6], 0.1, 0.5), "eta=0.6, expected"),
        (lambda: tradeoff([], pl.Cluster(4), CONSTANTS, 0.1, [1.0]), "no protocols are given"),
        (lambda: tradeoff([pl.asp(), pl.asp()], pl.Cluster(4), CONSTANTS, 0.1, [1.0]), "asp is given twice"),
        (
            lambda: tradeoff([pl.asp() + pl.dc_s3gd()], pl.Cluster(4), CONSTANTS, 0.1, [1.0]),
            "expected a pl.plans.Protocol alone such as",
        ),
        (lambda: tradeoff([pl.asp()], pl.Cluster(4), CONSTANTS, 0.1, [-1.0]), "expected a list of seconds >= 0"),
        (lambda: tradeoff([pl.ssp(2)], pl.Cluster(4), CONSTANTS, 0.1, [1.0]), r"no theory for ssp\(lead=2\)"),
    ],
)
def test_invalid_numbers_are_refused(call, words):
    with pytest.raises(pl.UsageError, match=words):
        call()


# -- error against time


def test_fig_7_asynchronous_falls_faster_to_a_higher_floor():
    constants = Constants(L=1.0, c=0.5, sigma2=1.0, gamma=0.2)
    at_s = np.linspace(0, 400, 2_001)
    curves = tradeoff([pl.bsp(), pl.k_async(4), pl.asp()], pl.Cluster(8), constants, 0.1, at_s)
    assert curves.errors["bsp"] == pytest.approx(sync_error(constants, 0.1, 8, at_s / (761 / 280)))
    assert curves.errors["asp"] == pytest.approx(async_error(constants, 0.1, 1, 1 / 8, at_s * 8))
    assert curves.errors["k_async(k=4)"][-1] == pytest.approx(async_floor(constants, 0.1, 4, 0.5), rel=1e-3)
    assert np.all(np.diff(curves.best_k[1:]) >= 0)  # later, more synchrony is better
    assert set(curves.best_k) == {1, 4, 8}
    assert (curves.best[1], curves.best[-1]) == ("asp", "bsp")


def test_gamma_may_differ_between_protocols():
    protocols, at_s = [pl.k_async(2), pl.k_async(6)], [10.0]
    curves = tradeoff(protocols, pl.Cluster(8), CONSTANTS, 0.1, at_s, gammas={"k_async(k=2)": 0.6})
    same = tradeoff(protocols, pl.Cluster(8), CONSTANTS, 0.1, at_s)
    assert curves.errors["k_async(k=2)"] > same.errors["k_async(k=2)"]
    assert curves.errors["k_async(k=6)"] == same.errors["k_async(k=6)"]


PARETO = pl.Cluster(12, pl.timing.Pareto(scale_s=1.0, shape=2.5))


def test_k_async_with_a_heavy_tail_is_ranked_by_its_simulated_time():
    """At most 2.404 s per update by E[X_K:K]; 0.4555 s by pl.simulate with 40,000 updates. K-sync takes 1.118 s."""
    constants = Constants(L=1.0, c=0.5, sigma2=1.0, gamma=0.2)
    curves = tradeoff([pl.k_sync(3), pl.k_async(3)], PARETO, constants, 0.1, [1.0, 5.0, 1000.0])
    runtime = curves.runtimes["k_async(k=3)"]
    assert runtime.seconds_per_update == pytest.approx(0.4555, rel=0.02)
    assert (runtime.kind, runtime.lower_s, runtime.upper_s) == (
        "simulated",
        pytest.approx(3 * 5 / 3 / 12),
        pytest.approx(2.404, abs=1e-3),
    )
    assert curves.simulated == ["k_async(k=3)"]
    assert "simulated_times=[k_async(k=3)]" in repr(curves)
    assert curves.best == ["k_async(k=3)", "k_async(k=3)", "k_sync(k=3)"]


@pytest.mark.slow
@parametrize_few("protocol", [pl.pull(4), pl.backup(4), pl.k_batch_sync(300)], keep=1)
def test_seconds_without_theory_are_simulated(protocol):
    curves = tradeoff([protocol], PARETO, CONSTANTS, 0.1, [1.0])
    measured = pl.simulate(protocol, PARETO, updates=10_000 if protocol.quorum == 4 else 500, seed=7)
    runtime = curves.runtimes[protocol.name]
    assert (runtime.kind, runtime.k) == ("simulated", protocol.quorum)
    assert runtime.seconds_per_update == pytest.approx(measured.seconds_per_update, rel=0.02)


def test_known_expectations_are_not_simulated():
    protocols = [pl.bsp(), pl.k_sync(4), pl.k_batch_async(4), pl.asp(), pl.k_batch_sync(4)]
    curves = tradeoff(protocols, PARETO, CONSTANTS, 0.1, [1.0])
    assert curves.simulated == []
    assert curves.runtimes == {each.name: pl.theory.expected(each, PARETO) for each in protocols}
