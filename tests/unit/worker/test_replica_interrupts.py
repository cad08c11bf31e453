"""An interrupt is noticed between any two layers, forward and backward."""

import pytest
import torch
from torch import nn

from paceline.server.parameter_server import ParameterServer
from paceline.worker.gradient_source import Interrupted
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model
from tiny_jobs import tiny_job

LAYERS = 6


class Trace(torch.autograd.Function):
    """Identity that writes down when it is passed, forward and backward."""

    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        log.append(f"forward {name}")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(f"backward {ctx.name}")
        return gradient, None, None


class Layer(nn.Module):
    log: list[str] = []  # noqa: RUF012  # shared by all layers on purpose

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return Trace.apply(x * self.weight, self.log, self.name)


def deep_model():
    return nn.Sequential(*[Layer(str(i)) for i in range(LAYERS)], nn.Linear(5, 3).double())


@pytest.mark.parametrize("looks", range(1, 2 * LAYERS + 2))
def test_a_task_ends_at_the_next_interrupt_check_between_layers(looks):
    remaining = looks

    def check():
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise Interrupted

    job = tiny_job(model=deep_model)
    replica = Replica(job, 0, 1)
    replica.set_check(check)
    server = ParameterServer(job, build_model(job, 0), replica.layout, None)
    version, gradient = replica.layout.allocate(), replica.layout.allocate()
    server.publish(version)
    Layer.log.clear()
    with pytest.raises(Interrupted):
        replica.gradient(0, 1, None, version, gradient)
    # One look before the minibatch, one before each layer, one before each layer's backward, the last layer's too.
    order = [f"forward {i}" for i in range(LAYERS)] + [f"backward {i}" for i in reversed(range(LAYERS))]
    done = looks - 1 if looks <= LAYERS else max(LAYERS, looks - 2)
    assert len(Layer.log) <= done
    assert Layer.log == order[: len(Layer.log)]
    assert len(Layer.log) >= done - 1


def test_without_an_interrupt_the_task_is_finished():
    job = tiny_job(model=deep_model)
    replica = Replica(job, 0, 1)
    replica.set_check(lambda: None)
    server = ParameterServer(job, build_model(job, 0), replica.layout, None)
    version, gradient = replica.layout.allocate(), replica.layout.allocate()
    server.publish(version)
    Layer.log.clear()
    assert replica.gradient(0, 1, None, version, gradient).finite
    assert len(Layer.log) == 2 * LAYERS
