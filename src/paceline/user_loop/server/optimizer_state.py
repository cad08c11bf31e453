"""State of a user's optimizer under the names of its parameters, as it travels between rank 0 and the server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.codec import decode, encode
from paceline.errors import UsageError
from paceline.jobs.local_shards import as_shard_of, local_of
from paceline.server.optimizer import own_options
from paceline.server.parameter_server import ParameterServer

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
PLAIN = bool | int | float
OPTIONS = "@"  # in place of the name of a parameter: options of a group, whose number is the key
NEST = "$"  # before the key of a list or dictionary, of which the text travels as a tensor
PART = "%"  # before the path of a tensor in it
NUMBER = "#"  # before the key of a number of Python, which travels as a tensor


def named_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the state of an optimizer on the CPU, under "key parameter", and of the options of its steps.

    Raises:
        UsageError: a part of the state is not of tensors and plain values.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    >>> model(torch.ones(1)).backward()
    >>> optimizer.step()
    >>> named_state(optimizer, model)
    {'momentum_buffer weight': tensor([[1.]])}
    """
    state: dict[str, Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        if own := own_options(optimizer):
            state |= _nested(str(number), OPTIONS, {each: group[each] for each in sorted(own & group.keys())})
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items() if parameter.requires_grad else ():
            if isinstance(value, Tensor):
                state[f"{key} {name}"] = local_of(value.detach()).cpu().clone().contiguous()
            elif isinstance(value, PLAIN):
                state[f"{NUMBER}{key} {name}"] = torch.tensor(
                    value, dtype=torch.float64 if isinstance(value, float) else None
                )
            elif value is not None:
                state |= _nested(key, name, value)
    return state


def can_travel(value: object) -> bool:
    """Return whether a part of the state of an optimizer is of tensors and plain values."""
    if isinstance(value, Mapping):
        return all(map(can_travel, value.values()))
    if isinstance(value, list | tuple):
        return all(map(can_travel, value))
    return value is None or isinstance(value, Tensor | PLAIN | str)


def _nested(key: str, name: str, value: object) -> dict[str, Tensor]:
    """Return a list, a dictionary or another nest of tensors and plain values in the state of a parameter.

    Raises:
        UsageError: a part of it is none of these.
    """
    tensors: dict[str, Tensor] = {}
    try:
        content = json.dumps(encode(value, tensors, key)).encode()
    except UsageError as error:
        raise UsageError(
            f"{key} of {name} in the state of the optimizer is of type {type(value).__name__}, expected tensors, "
            "numbers and plain containers of them: give all_reduce, under which the optimizer steps itself"
        ) from error
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return {f"{NEST}{key} {name}": text, **{f"{PART}{path} {name}": each for path, each in tensors.items()}}


def with_state(make: OptimizerFactory, state: Mapping[str, Tensor]) -> OptimizerFactory:
    """Return a factory of optimizers that begin with what `named_state` has returned."""

    def make_with_state(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        parameters = dict(named_parameters)
        optimizer = make(parameters.items())
        _load(optimizer, parameters, state)
        return optimizer

    return make_with_state


def load_named_state(optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Replace the state of an optimizer by what `named_state` has returned."""
    _load(optimizer, dict(model.named_parameters()), state)


def _load(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> None:
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    on_device = {parameter for group in groups for parameter in group["params"]}
    optimizer.state.clear()
    for both, value in state.items():
        key, _, name = both.partition(" ")
        if key.startswith(PART):
            continue  # of a nest
        if name == OPTIONS:
            optimizer.param_groups[int(key.removeprefix(NEST))].update(_nest(state, key, name, "cpu"))
            continue
        parameter = parameters[name]
        if key.startswith(NEST):
            optimizer.state[parameter][key.removeprefix(NEST)] = _nest(state, key, name, parameter.device)
            continue
        if key.startswith(NUMBER):
            optimizer.state[parameter][key.removeprefix(NUMBER)] = value.item()
            continue
        # As in torch, a scalar such as `step` stays on the CPU, unless a kernel on the device reads it.
        moves = value.ndim or parameter in on_device
        optimizer.state[parameter][key] = as_shard_of(parameter, value.to(parameter.device)) if moves else value


def _nest(state: Mapping[str, Tensor], key: str, name: str, device: torch.device | str) -> Any:
    """Return what `_nested` has described."""
    parts = {
        other.partition(" ")[0].removeprefix(PART): each.to(device)
        for other, each in state.items()
        if other.startswith(PART) and other.partition(" ")[2] == name
    }
    return decode(json.loads(state[f"{key} {name}"].numpy().tobytes()), parts)


def state_reader(server: ParameterServer) -> Callable[[], dict[str, Tensor]]:
    """Return a function that reads the state of a server's optimizer from another thread, between two steps."""
    server.optimizer_lock = threading.Lock()

    def read() -> dict[str, Tensor]:
        with server.optimizer_lock:
            return named_state(server.optimizer, server.model)

    return read
