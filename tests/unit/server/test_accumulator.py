"""Gradient accumulation: the mean does not depend on when gradients are added."""

import pytest
import torch
from torch import nn

from paceline.server.accumulator import GradientAccumulator
from paceline.tensors.flat_buffers import FlatLayout

VALUES, SAMPLES, SCALES, WORKERS = [1.0, -3.0, 5.0], [8, 4, 2], [1.0, 0.5, 2.0], [3, 1, 2]
MEAN = (8 * 1.0 - 2 * 3.0 + 4 * 5.0) / 14


def layout_of():
    return FlatLayout(nn.BatchNorm1d(3).double())


def gradients(layout):
    made = [layout.allocate() for _ in VALUES]
    for gradient, value in zip(made, VALUES, strict=True):
        for flat in [*gradient.flat_parameters, *gradient.flat_buffers]:
            flat.fill_(value)
    return made


@pytest.mark.parametrize("accumulate_after", [(), (1,), (2,), (1, 2), (1, 2, 3)])
def test_the_mean_is_the_same_whenever_the_queue_is_added(accumulate_after):
    layout = layout_of()
    accumulator = GradientAccumulator(layout, torch.device("cpu"))
    for number, each in enumerate(zip(gradients(layout), SAMPLES, SCALES, WORKERS, strict=True), 1):
        accumulator.enqueue(*each)
        if number in accumulate_after:
            accumulator.accumulate()
    finished = accumulator.finish()
    mean, count = finished.whole, finished.count
    assert count == 3
    assert torch.allclose(mean.parameters[0], torch.tensor(MEAN, dtype=torch.float64), rtol=1e-12)
    by_samples = sum(value * samples for value, samples in zip(VALUES, SAMPLES, strict=True)) / sum(SAMPLES)
    assert torch.allclose(mean.buffers[0], torch.tensor(by_samples, dtype=torch.float64), rtol=1e-12)
    assert mean.buffers[2].item() == VALUES[1]  # batches counted, a whole number: that of the lowest worker


def test_a_single_gradient_is_its_own_mean():
    layout = layout_of()
    accumulator = GradientAccumulator(layout, torch.device("cpu"))
    first, second, _ = gradients(layout)
    for gradient in (first, second):
        accumulator.enqueue(gradient, 8, 1.0)
        accumulator.accumulate()
        assert accumulator.finish().whole is gradient


def test_a_restored_accumulator_continues_the_mean():
    layout = layout_of()
    saved, restored = (GradientAccumulator(layout, torch.device("cpu")) for _ in range(2))
    *before, last = zip(gradients(layout), SAMPLES, SCALES, WORKERS, strict=True)
    for each in before:
        saved.enqueue(*each)
    restored.load_state_dict(saved.state_dict())
    restored.enqueue(*last)
    mean = restored.finish().whole
    assert torch.allclose(mean.parameters[0], torch.tensor(MEAN, dtype=torch.float64), rtol=1e-12)
    assert mean.buffers[2].item() == VALUES[1]


def test_a_restored_state_takes_the_place_of_a_mean_in_progress():
    layout = layout_of()
    fresh, used = (GradientAccumulator(layout, torch.device("cpu")) for _ in range(2))
    first, second, third = gradients(layout)
    first.written, second.written, third.written = {0}, {1}, {1}
    first.parameters[0].fill_(torch.inf)
    used.enqueue(first, 8, 1.0)
    used.flush()
    used.enqueue(second, 4, 1.0)
    used.load_state_dict(fresh.state_dict())
    used.enqueue(third, 2, 1.0)
    mean = used.finish()
    assert mean.count == 1
    assert mean.not_finite is None
    assert mean.whole is third
