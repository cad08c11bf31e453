from random import Random

import pytest

from paceline.policies.estimators.noise.loss_rise import LossRise


def alarms(losses, begins=48):
    """Return the gradients, after the beginning, at which the loss has risen."""
    rise, found = LossRise(), []
    for i, loss in enumerate(losses):
        if i == begins:
            rise.begin()
        if rise.accept(loss) and i >= begins:
            found.append(i - begins)
    return found


def falling(random, gradients, spread=0.2, to=0.3):
    return [random.gauss(to + 50 / (50 + i), spread) for i in range(gradients)]


def test_a_loss_that_falls_raises_few_alarms():
    runs = [alarms(falling(Random(seed), 800)) for seed in range(40)]
    assert sum(map(bool, runs)) <= 2


@pytest.mark.parametrize("growth", [1.05, 1.2])
def test_a_loss_that_diverges_is_noticed_before_it_has_doubled(growth):
    for seed in range(20):
        random = Random(seed)
        grown = [random.gauss(growth**i, 0.2) for i in range(100)]
        [first, *_] = alarms([*(random.gauss(1.0, 0.2) for _ in range(100)), *grown], begins=100)
        assert growth ** (first - 8) <= 2


def test_it_goes_on_from_its_state():
    random = Random(0)
    losses = [*falling(random, 200), *[3.0] * 10]
    first, second = LossRise(), LossRise()
    for loss in losses[:150]:
        first.accept(loss)
    second.load_state_dict(first.state_dict())
    assert [first.accept(loss) for loss in losses[150:]] == [second.accept(loss) for loss in losses[150:]]
    assert first.state_dict() == second.state_dict()
