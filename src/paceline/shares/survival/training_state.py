"""State of the training of one rank: of its models, or of its shards of them, its optimizers and GradScalers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class TrainingState:
    """State of a rank after its last step, which another rank may lack.

    Attributes:
        models: models in DDP, and modules that FSDP shards.
        optimizers: optimizers that have made a step.
        scalers: GradScalers of the script.
    """

    def __init__(self) -> None:
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scalers: list[Any] = []

    def content(self) -> dict[str, Any]:
        """Return the state, with the shard of this rank alone where there is one."""
        return {
            "models": [_shard_of(each) for each in self._tensors()],
            "optimizers": [_map_state(each.state_dict()["state"], _shard_of) for each in self.optimizers],
            "scalers": [each.state_dict() for each in self.scalers],
        }

    def load(self, content: dict[str, Any]) -> None:
        """Take over the state of another rank; learning rates are this rank's own."""
        with torch.no_grad():
            for each, value in zip(self._tensors(), content["models"], strict=True):
                _shard_of(each).copy_(value)
        for optimizer, given in zip(self.optimizers, content["optimizers"], strict=True):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            state = {
                index: {name: _as_shard(value, parameters[index]) for name, value in values.items()}
                for index, values in given.items()
            }
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        for scaler, given in zip(self.scalers, content["scalers"], strict=True):
            scaler.load_state_dict(given)

    def reset_reducers(self) -> None:
        """Let the next backward pass begin as if there was none before."""
        for model in self.models:
            if isinstance(model, DistributedDataParallel):
                model.reducer._reset_state()

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Return the parameters and buffers of all models, each once."""
        seen: set[int] = set()
        for model in self.models:
            for each in (*model.parameters(), *model.buffers()):
                if id(each) not in seen:
                    seen.add(id(each))
                    yield each


def _shard_of(value: Any) -> Any:
    """Return the shard of this rank, of a tensor that FSDP shards; else the value."""
    return value.to_local() if hasattr(value, "to_local") else value


def _as_shard(value: Any, parameter: Any) -> Any:
    """Return a value of an optimizer's state as it belongs to a parameter: as a shard, if it has the shape of that."""
    is_shard = hasattr(parameter, "to_local") and isinstance(value, torch.Tensor)
    if not is_shard or value.shape != parameter.to_local().shape:
        return value
    return type(parameter.data).from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _map_state(state: dict[Any, dict[str, Any]], function: Any) -> dict[Any, dict[str, Any]]:
    return {index: {name: function(value) for name, value in values.items()} for index, values in state.items()}
