"""State of a user's optimizer under the names of its parameters, as it travels between rank 0 and the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.server.parameter_server import ParameterServer

PLAIN = bool | int | float
NUMBER = "#"  # before the key of a number of Python, which travels as a tensor


def named_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the state of an optimizer on the CPU, under "key parameter".

    Raises:
        UsageError: a part of the state is neither a tensor nor a number.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    >>> model(torch.ones(1)).backward()
    >>> optimizer.step()
    >>> named_state(optimizer, model)
    {'momentum_buffer weight': tensor([[1.]])}
    """
    state = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items() if parameter.requires_grad else ():
            if isinstance(value, Tensor):
                state[f"{key} {name}"] = value.detach().cpu().clone().contiguous()
            elif isinstance(value, PLAIN):
                state[f"{NUMBER}{key} {name}"] = torch.tensor(
                    value, dtype=torch.float64 if isinstance(value, float) else None
                )
            elif value is not None:
                raise UsageError(
                    f"{key} of {name} in the state of the optimizer is of type {type(value).__name__}, expected a "
                    "tensor or a number: load a state that this version of torch has saved"
                )
    return state


def load_named_state(optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Replace the state of an optimizer by what `named_state` has returned."""
    parameters = dict(model.named_parameters())
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    on_device = {parameter for group in groups for parameter in group["params"]}
    optimizer.state.clear()
    for both, value in state.items():
        key, _, name = both.partition(" ")
        parameter = parameters[name]
        if key.startswith(NUMBER):
            optimizer.state[parameter][key.removeprefix(NUMBER)] = value.item()
            continue
        # As in torch, a scalar such as `step` stays on the CPU, unless a kernel on the device reads it.
        moves = value.ndim or parameter in on_device
        optimizer.state[parameter][key] = value.to(parameter.device) if moves else value


def state_reader(server: ParameterServer) -> Callable[[], dict[str, Tensor]]:
    """Return a function that reads the state of a server's optimizer from another thread, between two steps."""
    server.optimizer_lock = threading.Lock()

    def read() -> dict[str, Tensor]:
        with server.optimizer_lock:
            return named_state(server.optimizer, server.model)

    return read
