"""The loss still to go: exact for power laws, robust against noise, and the same after a restart."""

import random
from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies.estimators.noise.loss_to_go import BLOCKS, LossToGo


def fed(losses, every=16):
    ours = LossToGo()
    for i, loss in enumerate(losses, start=1):
        ours.accept(loss)
        if i % every == 0:
            ours.update()
    return ours


@pytest.mark.parametrize(
    ("gradients", "power", "tolerance"),
    [(3000, 0.5, 0.03), (3000, 1.0, 0.03), (3000, 1.5, 0.12), (3000, 2.0, 0.25), (200, 0.5, 0.15), (200, 1.5, 0.15)],
)
def test_a_power_law_is_recognized_whatever_its_constant(gradients, power, tolerance):
    ours = fed(0.7 + 3.0 * i**-power for i in range(1, gradients + 1))
    assert ours.update() == pytest.approx(3.0 * gradients**-power, rel=tolerance)
    assert ours.has_fallen


@pytest.mark.slow
def test_noise_on_the_losses_averages_out():
    rng = random.Random(0)
    found = [fed(1.0 + 10.0 / i + rng.gauss(0, 0.05) for i in range(1, 1001)).update() for _ in range(20)]
    assert sum(found) / len(found) == pytest.approx(0.01, rel=0.35)


def test_a_loss_that_does_not_fall_has_its_standard_error_to_go():
    for seed in range(10):
        rng = random.Random(seed)
        ours = fed(2.0 + rng.gauss(0, 1.0) for _ in range(1000))
        assert 0.3 < ours.update() * 1000**0.5 < 3.0
        assert not ours.has_fallen


def test_a_rise_of_the_loss_does_not_look_like_far_to_go():
    losses = [1.0 + 10.0 / i for i in range(1, 1001)]
    before = fed(losses).update()
    assert fed([*losses, *(2.0 - i / 300 for i in range(300))]).update() <= 1.5 * before


def test_a_transient_at_the_start_is_forgotten():
    """A loss that is 100 in the first hundred gradients, then 1 / i, has 1 / i to go."""
    ours = fed(100.0 if i <= 100 else 1.0 / i for i in range(1, 6001))
    assert ours.update() == pytest.approx(1 / 6000, rel=0.05)


def test_a_loss_that_cannot_be_negative_has_no_more_to_go_than_itself():
    falling = [2.0 - 1.8 * i / 1000 for i in range(1000)]  # a straight line looks like a fall that goes on
    assert 0.2 < fed(falling).update() < 0.4
    assert fed([*falling[:500], -0.1, *falling[500:]]).update() > 0.6


def test_it_is_unknown_at_first():
    ours = LossToGo()
    assert isnan(ours.update())
    ours.accept(1.0)
    assert isnan(ours.update())


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(0, 300), st.booleans())
def test_it_goes_on_from_its_state_in_constant_memory(losses, at, drops):
    whole, restored = LossToGo(), LossToGo()
    for i, loss in enumerate(losses):
        if i == at:
            if drops:
                whole.freeze()
            restored.load_state_dict(whole.state_dict())
        for ours in (whole, *([restored] if i >= at else [])):
            ours.accept(loss)
            ours.update()
    if at < len(losses):
        assert vars(restored) == vars(whole) or isnan(whole.value)
    assert len(whole.state_dict()["_sums"]) <= BLOCKS
    assert isnan(whole.value) or whole.value >= 0


def test_a_long_run_goes_on_from_its_state():
    whole, restored = LossToGo(), LossToGo()
    for i in range(1, 301):
        if i == 200:
            restored.load_state_dict(whole.state_dict())
        for ours in (whole, restored) if i >= 200 else (whole,):
            ours.accept(1.0 + 10.0 / i)
            ours.update()
    assert vars(restored) == vars(whole)
