"""AdaSync: its equation and its limits."""

import pytest

import paceline as pl
from driven_controller import Driven


# -- AdaSync
@pytest.mark.parametrize("K_0", [1, 2, 7])
@pytest.mark.parametrize("F", [0.01, 0.3, 1.0, 2.0, 3.0])
def test_adasync_solves_its_equation(K_0, F):
    P, F_0 = 16, 2.0
    driven = Driven(pl.controllers.AdaSync(K_0=K_0), P, pl.k_sync(k=1))
    K = pl.controllers.AdaSync(K_0=K_0).quorum(F_0, F, observation_of(driven))
    c = K_0**2 * F_0 / ((P - K_0) * F)
    residual = {k: k * k + c * k - c * P for k in (K - 0.5, K + 0.5)}
    assert residual[K - 0.5] <= 0 <= residual[K + 0.5] or K in (1, P)
    if F == F_0:
        assert K == K_0
    batch = Driven(pl.controllers.AdaSync(K_0=K_0), P, pl.k_batch_sync(k=1))
    assert pl.controllers.AdaSync(K_0=K_0).quorum(F_0, F, observation_of(batch)) == max(
        1, round(K_0 * (F_0 / F) ** 0.5)
    )


@pytest.mark.parametrize("base", [pl.k_sync(k=1), pl.k_batch_sync(k=1)])
@pytest.mark.parametrize(("F_0", "F"), [(2.0, 0.0), (0.0, 0.0), (2.0, -1.0), (-1.0, 2.0)])
def test_adasync_waits_for_all_at_a_non_positive_loss(base, F_0, F):
    assert (
        pl.controllers.AdaSync(K_0=2).quorum(F_0, F, observation_of(Driven(pl.controllers.AdaSync(K_0=2), 8, base)))
        == 8
    )


def test_adasync_waits_for_all_at_a_loss_near_zero():
    observation = observation_of(Driven(pl.controllers.AdaSync(K_0=2), 8, pl.k_sync(k=1)))
    assert [pl.controllers.AdaSync(K_0=2).quorum(2.0, 10.0**-e, observation) for e in (10, 18, 30, 300)] == [8] * 4


def observation_of(driven):
    seen = []
    driven.controller = type("Keeps", (), {"decide": lambda self, state, observation: (seen.append(observation), [])})()
    driven.ask("open")
    return seen[0]


def test_adasync_waits_for_more_as_the_loss_falls():
    driven = Driven(pl.controllers.AdaSync(K_0=2, D=1), 8, pl.k_sync(k=2))
    ks = [driven.k, *(driven.update(loss=loss) for loss in (2.0, 1.0, 0.5, 0.1, 0.01))]
    assert ks[:2] == [2, 2]
    assert ks == sorted(ks)
    assert ks[-1] == 8
