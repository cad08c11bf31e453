"""Writes to parameters are found by version counters, and by elements where ``.data`` was written."""

import pytest
import torch
from torch import nn

from paceline.worker.write_watch import FIRST_STEPS, PERIOD, WriteWatch


def watched(**settings):
    """Return the parameters of a network in several layouts and dtypes, and their watch."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Linear(9, 9), nn.Linear(2, 2).to(torch.bfloat16))
    model[0].to(memory_format=torch.channels_last)
    model[1].weight = nn.Parameter(torch.randn(9, 9).t())
    named = dict(model.named_parameters())
    return named, WriteWatch(named, **settings)


WRITES = {
    "in place": lambda each: each.mul_(2),
    "an element": lambda each: each.view(-1)[0].sub_(1) if each.is_contiguous() else each.sub_(1),
    "through data": lambda each: each.data.mul_(2),
    "an element through data": lambda each: each.data.permute(*range(each.ndim))[(0,) * each.ndim].sub_(1),
    "other data": lambda each: setattr(each, "data", each.data + 1),
    "zeros": lambda each: nn.init.zeros_(each),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", ["0.weight", "1.weight", "1.bias", "2.weight"])
def test_a_write_is_found_by_name(name, write):
    named, watch = watched()
    watch.mark()
    assert watch.changed() == []
    with torch.no_grad():
        write(named[name])
    assert watch.changed() == [name]
    watch.mark()
    assert watch.changed() == []


def test_elements_are_compared_in_the_first_steps_and_then_at_each_hundredth():
    named, watch = watched()
    found = []
    for step in range(1, 2 * PERIOD + 1):
        watch.mark()
        named["1.bias"].data.add_(1)
        found += [step] if watch.changed() else []
    assert found == [*range(1, FIRST_STEPS + 1), PERIOD, 2 * PERIOD]


def test_every_step_compares_elements_if_asked():
    named, watch = watched(always=True)
    for _ in range(2 * FIRST_STEPS):
        watch.mark()
        named["1.bias"].data.add_(1)
        assert watch.changed() == ["1.bias"]


def test_nan_is_equal_to_itself():
    named, watch = watched()
    named["1.bias"].data.fill_(torch.nan)
    watch.mark()
    assert watch.changed() == []
