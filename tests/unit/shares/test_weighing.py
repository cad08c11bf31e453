"""Weights of backward passes, of losses that do not stay what they were at first."""

import pytest
import torch

from paceline.errors import UsageError
from paceline.shares.weighing import READ_ALWAYS, Weighing

SAMPLES = 6


class OneRank:
    """Exchange of a rank that is alone."""

    count = 1

    def gather(self, row):
        return [row]


LOSSES = {
    "mean": lambda errors: errors.mean(),
    "sum": lambda errors: errors.sum(),
    "sum over a number": lambda errors: errors.sum() / 7.0,
    "sum over samples": lambda errors: errors.sum() / SAMPLES,
    "product": lambda errors: errors.prod(),
}


def loss_of(name):
    outputs = torch.nn.Linear(2, 2)(torch.ones(SAMPLES, 2))
    return LOSSES[name](outputs.pow(2))


def begun(name):
    weighing = Weighing("auto", OneRank(), is_read_always=True)
    weighing.begin(loss_of(name), SAMPLES)
    return weighing


@pytest.mark.parametrize(
    ("name", "weight"), [("mean", 0.75), ("sum", 1.0), ("sum over a number", 1.0), ("sum over samples", 0.75)]
)
def test_a_loss_that_stays_what_it_was_has_its_weight(name, weight):
    assert begun(name).weight_of(loss_of(name), SAMPLES, 0.75) == weight


def test_a_divisor_may_happen_to_be_the_number_of_samples():
    assert begun("sum over a number").weight_of(loss_of("sum over samples"), SAMPLES, 0.75) == 1.0


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        ("mean", "sum", "is a sum, and the first one was a mean"),
        ("mean", "sum over a number", "is a sum, and the first one was a mean"),
        ("mean", "product", "give --weigh tokens"),
        ("sum", "mean", "is a mean, and the first one was a sum"),
        ("sum over a number", "mean", "is a mean, and the first one was a sum"),
        ("sum", "product", "does not show what it is a mean of"),
    ],
)
def test_a_loss_of_another_kind_is_refused(first, then, told):
    with pytest.raises(UsageError, match=told):
        begun(first).weight_of(loss_of(then), SAMPLES, 0.75)


def test_a_loss_that_compares_samples_is_refused_once_their_number_changes():
    def loss(samples):
        outputs = torch.nn.Linear(2, 3)(torch.ones(samples, 2))
        return torch.nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(samples))

    weighing = Weighing("auto", OneRank(), is_read_always=True)
    weighing.begin(loss(SAMPLES), SAMPLES)
    weighing.weight_of(loss(SAMPLES), SAMPLES, 1.0)
    with pytest.raises(UsageError, match="compares each sample with all"):
        weighing.weight_of(loss(4), 4, 0.75)


def test_as_many_classes_as_samples_are_no_comparison():
    def loss(samples):
        outputs = torch.nn.Linear(2, SAMPLES)(torch.ones(samples, 2))
        return torch.nn.functional.cross_entropy(outputs, torch.zeros(samples, dtype=torch.long))

    weighing = Weighing("auto", OneRank(), is_read_always=True)
    weighing.begin(loss(SAMPLES), SAMPLES)
    assert weighing.weight_of(loss(4), 4, 0.75) == 0.75
    weighing = Weighing("auto", OneRank(), is_read_always=True)
    weighing.begin(loss(4), 4)
    assert weighing.weight_of(loss(SAMPLES), SAMPLES, 1.5) == 1.5


def test_a_loss_that_is_read_seldom_is_read_when_a_batch_has_a_new_size():
    weighing = Weighing("auto", OneRank(), is_read_always=False)
    weighing.begin(loss_of("mean"), SAMPLES)
    for _ in range(READ_ALWAYS + 1):
        weighing.weight_of(loss_of("mean"), SAMPLES, 1.0)
    weighing.weight_of(loss_of("sum"), SAMPLES, 1.0)
    with pytest.raises(UsageError):
        weighing.weight_of(loss_of("sum"), SAMPLES + 1, 1.0)
