"""Buffers of a model that runs: a job may assign others of the same names, shapes and types."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

from paceline.errors import UsageError

Kind = tuple[torch.dtype, torch.Size]


class BufferWatch:
    """Watch over the buffers of a model, whose places in the memory of versions are those at its start.

    Args:
        model: model at the start of the run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kinds = {name: (buffer.dtype, buffer.shape) for name, buffer in model.named_buffers()}
        self._read()

    def current(self) -> list[Tensor]:
        """Return the buffers as they are now, in the order of the start.

        Raises:
            UsageError: a buffer was added or removed, or has another shape or type.
        """
        seen: list[object] = [each for registry in self._registries for each in registry.values()]
        is_known = len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen))
        if not is_known or any(map(operator.ne, [each.shape for each in self._buffers], self._shapes)):
            self._read()
        return self._buffers

    def _read(self) -> None:
        buffers = dict(self._model.named_buffers())
        now = {name: (buffer.dtype, buffer.shape) for name, buffer in buffers.items()}
        if now != self._kinds:
            name = min(name for name, _ in now.items() ^ self._kinds.items())
            raise UsageError(
                f"buffer {name} of the model is {_described(now.get(name))}, but was "
                f"{_described(self._kinds.get(name))} when the run began: give it its final shape before, for example "
                "by a forward pass when the model is made"
            )
        self._buffers = [buffers[name] for name in self._kinds]
        self._shapes = [each.shape for each in self._buffers]
        modules = list(self._model.modules())
        self._registries = [registry for each in modules for registry in (each._buffers, each._modules)]
        self._seen: list[object] = [each for registry in self._registries for each in registry.values()]


def _described(kind: Kind | None) -> str:
    if kind is None:
        return "missing"
    dtype, shape = kind
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
