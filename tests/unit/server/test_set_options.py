"""Options of an optimizer that another process sends: what the server takes, it can step with."""

import pytest
import torch
from torch import nn

from paceline.server.optimizer import LONGEST_REASON, set_options
from selections import parametrize_few

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "plain SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.1),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
}
if hasattr(torch.optim, "Adafactor"):  # since torch 2.5
    OPTIMIZERS["Adafactor"] = lambda parameters: torch.optim.Adafactor(parameters, lr=0.1)
VALUES = (None, True, False, 0, 3, -1.0, 0.5, 2.0, "", "0.1", "x" * 200_000, "\x1b[2J")
VALUES += ((), (0.9,), (0.9, 0.99), (0.9, 0.99, 0.999), (0.9, "x"), (None, None), (2.0, -1.0))


def stepped_optimizer(name):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(4))
    optimizer = OPTIMIZERS[name]([parameter])
    parameter.grad = torch.randn(4)
    optimizer.step()
    return optimizer


def options_of(optimizer):
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}


OFTEN = ("SGD", "Adam")


@parametrize_few(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS], keep=1
)
def test_the_server_can_step_with_each_option_that_it_takes(name):
    options = [option for option in stepped_optimizer(name).param_groups[0] if option not in {"params", "lr"}]
    for option in [*options, "params", "\x1b[2Jnew", "x" * 200_000]:
        for value in VALUES:
            optimizer = stepped_optimizer(name)
            before = options_of(optimizer)
            if reason := set_options(optimizer, [{option: value}]):
                assert len(reason) <= LONGEST_REASON
                assert "\x1b" not in reason
                assert options_of(optimizer) == before, (option, value)
            optimizer.step()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"weight_decay": 0.01, "momentum": 0.5, "nesterov": False, "dampening": 0}),
        ("Adam", {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}),
        ("AdamW", {"betas": (0.8, 0.9), "weight_decay": 0}),
        ("RMSprop", {"alpha": 0.5}),
        ("Adafactor", {"d": 2.0}),
    ],
)
def test_options_of_a_schedule_are_taken(name, options):
    if name not in OPTIMIZERS:
        pytest.skip(f"this torch has no {name}")
    optimizer = stepped_optimizer(name)
    assert set_options(optimizer, [options]) == ""
    assert options.items() <= optimizer.param_groups[0].items()
