"""Gradient accumulation: the mean does not depend on when gradients are added."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


def mean_of(gradients, arrivals, is_idle):
    """Return the mean of gradients that arrive in an order, and when the queue was empty last.

    Args:
        gradients: gradient of each worker.
        arrivals: workers in the order of arrival.
        is_idle: whether the server has time after each arrival.
    """
    accumulator = GradientAccumulator(layout_of(), torch.device("cpu"))
    left = set(arrivals)
    for worker, idle in zip(arrivals, is_idle, strict=True):
        left.discard(worker)
        accumulator.enqueue(gradients[worker], SAMPLES[worker % 3], SCALES[worker % 3], worker)
        if idle:
            accumulator.accumulate(min(left, default=len(arrivals)))
    return accumulator.finish().whole


@given(st.permutations(range(5)), st.lists(st.booleans(), min_size=5, max_size=5))
def test_the_bits_of_the_mean_do_not_depend_on_the_order_of_arrival(arrivals, is_idle):
    layout, generator = layout_of(), torch.Generator().manual_seed(0)
    made = [layout.allocate() for _ in arrivals]
    for gradient in made:
        for flat in [*gradient.flat_parameters, *gradient.flat_buffers]:
            flat.copy_(torch.randn(flat.shape, generator=generator) * 1e3)
    mean, expected = mean_of(made, arrivals, is_idle), mean_of(made, range(5), [False] * 5)
    for found, right in zip(
        [*mean.flat_parameters, *mean.flat_buffers], [*expected.flat_parameters, *expected.flat_buffers], strict=True
    ):
        assert torch.equal(found, right)


def test_a_gradient_waits_for_workers_below_it():
    layout = layout_of()
    accumulator = GradientAccumulator(layout, torch.device("cpu"))
    made = gradients(layout)
    for worker in (1, 2):
        accumulator.enqueue(made[worker], 8, 1.0, worker)
        accumulator.accumulate(below=0)
    assert len(accumulator._queue) == 2
    accumulator.flush(worker=0)  # whose gradient is not there
    assert len(accumulator._queue) == 2
    accumulator.flush(worker=2)
    assert not accumulator._queue
