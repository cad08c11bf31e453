"""Buffers of a model that runs: a job may assign others of the same names, shapes and types."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.tensors.flat_buffers import FlatBuffers, is_a_mean, write_difference
from paceline.worker.registered_objects import RegisteredObjects

Kind = tuple[torch.dtype, torch.Size]
REMEDY = "make a forward pass when the model is made, or give the buffer its final shape and first values there"


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
        if not self._registered.are_same() or self.have_other_shapes():
            self._read()
        return self._buffers

    def have_other_shapes(self) -> bool:
        """Return whether the shape of a buffer of the last look was changed in place."""
        return list(map(Tensor.size, self._buffers)) != self._shapes

    def write_changes(self, changes: FlatBuffers, version: FlatBuffers) -> None:
        """Write the changes of the buffers since a version; of whole numbers and booleans, the new values.

        Raises:
            UsageError: as of `current`, or an element was infinite, as that of an observer which has seen nothing.
        """
        buffers = self.current()
        for change, buffer in zip(changes.buffers, buffers, strict=True):
            change.copy_(buffer.detach())
        means = [pair for pair in zip(changes.flat_buffers, version.flat_buffers, strict=True) if is_a_mean(pair[0])]
        for end, start in means:
            write_difference(end, start, out=end)
        if all(change.sum().isfinite() for change, _ in means):
            return
        for name, buffer, start in zip(self._kinds, buffers, version.buffers, strict=True):
            if is_a_mean(start) and bool((start.isinf() & buffer.isfinite()).any()):
                raise UsageError(
                    f"buffer {name} of the model was infinite and is finite now, a change that workers cannot average: "
                    f"{REMEDY}"
                )

    def _read(self) -> None:
        buffers = dict(self._model.named_buffers())
        now = {name: (buffer.dtype, buffer.shape) for name, buffer in buffers.items()}
        if now != self._kinds:
            name = min(name for name, _ in now.items() ^ self._kinds.items())
            raise UsageError(
                f"buffer {name} of the model is {_described(now.get(name))}, but was "
                f"{_described(self._kinds.get(name))} when the run began: {REMEDY}"
            )
        self._buffers = [buffers[name] for name in self._kinds]
        self._shapes = list(map(Tensor.size, self._buffers))
        self._registered = RegisteredObjects(self._model, "_buffers", "_modules")


def _described(kind: Kind | None) -> str:
    if kind is None:
        return "missing"
    dtype, shape = kind
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
