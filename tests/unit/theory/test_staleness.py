"""Staleness by theory against simulation: the mean of every law, the distribution where it is known."""

import pytest

import paceline as pl
from paceline.theory import NoTheoryError, staleness
from selections import parametrize_few

P = 8
EXPONENTIAL, CONSTANT = pl.timing.Exponential(1.0), pl.timing.Deterministic(1.0)
STALE = [pl.asp(), pl.k_async(3), pl.k_async(4), pl.k_async(6), *map(pl.k_batch_async, (3, 6, 12))]
UNEQUAL = [
    pl.timing.Uniform(0.5, 1.0),
    pl.timing.Pareto(1.0, 3.0),
    pl.timing.Gamma(0.5, 1.0),
    pl.timing.HyperExponential((1.0, 11.0), (0.9, 0.1)),
    pl.timing.Gamma(4.0, 1.0),
]


def shares(protocol, law, gradients=10_000):
    """Return the mean staleness of a simulation, and a function that gives the share of a staleness."""
    totals = pl.simulate(protocol, pl.Cluster(P, law), updates=gradients // protocol.quorum).totals
    return totals.mean_staleness, lambda s: totals.staleness[s] / totals.used


@parametrize_few("protocol", STALE, ids=repr, keep=2)
@parametrize_few("law", [EXPONENTIAL, CONSTANT], keep=1, ids=repr)
def test_the_distribution_of_staleness(protocol, law):
    theory = staleness(protocol, pl.Cluster(P, law))
    _, share = shares(protocol, law)
    assert [share(s) for s in range(12)] == pytest.approx([theory.share(s) for s in range(12)], abs=0.02)
    assert share(0) == pytest.approx(theory.fresh_share, abs=0.02)


@pytest.mark.parametrize("protocol", STALE, ids=repr)
@pytest.mark.parametrize("law", [EXPONENTIAL, CONSTANT], ids=repr)
def test_probabilities_sum_to_one_and_give_the_mean(protocol, law):
    theory = staleness(protocol, pl.Cluster(P, law))
    share = [theory.share(s) for s in range(400)]
    assert min(share) >= 0
    assert sum(share) == pytest.approx(1)
    assert sum(s * each for s, each in enumerate(share)) == pytest.approx(theory.mean)


@pytest.mark.parametrize("protocol", [pl.asp(), pl.k_async(3), pl.k_async(6), pl.k_batch_async(12)], ids=repr)
@parametrize_few("law", UNEQUAL, keep=1, ids=repr)
def test_the_mean_of_every_distribution_and_the_bounds_of_the_fresh_share(protocol, law):
    theory = staleness(protocol, pl.Cluster(P, law))
    mean, share = shares(protocol, law, gradients=6_000)
    assert mean == pytest.approx(theory.mean, rel=0.02)
    assert theory.fresh_lower - 0.01 <= share(0) <= theory.fresh_upper + 0.01
    assert theory.fresh_share is None


def test_used_work_is_done_sooner_or_later_than_new_work():
    aged = staleness(pl.k_async(3), pl.Cluster(P, pl.timing.Uniform(0.5, 1.0)))
    young = staleness(pl.k_async(3), pl.Cluster(P, pl.timing.Gamma(0.5, 1.0)))
    assert (aged.fresh_lower, aged.fresh_upper) == (0, 3 / P)
    assert (young.fresh_lower, young.fresh_upper) == (3 / P, 1)


@pytest.mark.parametrize("protocol", [pl.bsp(), pl.k_sync(3), pl.k_batch_sync(12), pl.k_async(P)], ids=repr)
def test_synchronous_protocols_have_no_staleness(protocol):
    theory = staleness(protocol, pl.Cluster(P, pl.timing.Pareto(1.0, 2.0)))
    assert (theory.mean, theory.fresh_share, theory.share(0), theory.share(1)) == (0, 1, 1, 0)


def test_an_unknown_distribution_is_an_error_that_names_the_simulation():
    theory = staleness(pl.asp(), pl.Cluster(P, pl.timing.Uniform(0.5, 1.0)))
    with pytest.raises(NoTheoryError, match=r"unless times are exponential or constant; measure it with pl.simulate"):
        theory.share(0)


def test_protocols_with_a_staleness_bound_have_no_theory():
    with pytest.raises(NoTheoryError, match=r"there is no theory for ringmaster\(r=2\)"):
        staleness(pl.ringmaster(2), pl.Cluster(P))
