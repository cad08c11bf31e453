"""An object for many processes: packed once, its large tensors in memory that all of them map."""

from __future__ import annotations

import io
import mmap
import os
import pickle
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

from paceline.engines.local.memory import anonymous_file

LARGE_BYTES = 1 << 20
Place = tuple[int, torch.Size, torch.dtype]


class Parcel:
    """Holds an object that can be pickled; tensors of 1 MiB and more travel as one file descriptor.

    Raises:
        Exception: whatever pickle raises for what it cannot pickle.
    """

    def __init__(self, content: object) -> None:
        text = io.BytesIO()
        packer = _Packer(text)
        packer.dump(content)
        self._text = text.getvalue()
        self._nbytes = max(1, packer.nbytes)
        self._file = anonymous_file(self._nbytes)
        memory = mmap.mmap(self._file, self._nbytes)
        for tensor, (offset, _, _) in packer.large.values():
            _flat(memory, offset, tensor.dtype, tensor.numel()).copy_(tensor.detach().reshape(-1))

    def __getstate__(self) -> dict[str, Any]:
        return {"text": self._text, "nbytes": self._nbytes, "file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._text, self._nbytes = state["text"], state["nbytes"]
        self._file = state["file"].detach()

    def open(self) -> Any:
        """Return the object; its large tensors are those of every other process too."""
        memory = mmap.mmap(self._file, self._nbytes)
        self.close()
        return _Unpacker(io.BytesIO(self._text), memory).load()

    def close(self) -> None:
        """Let the file go."""
        os.close(self._file)


class _Packer(pickle.Pickler):
    def __init__(self, text: io.BytesIO) -> None:
        super().__init__(text)
        self.nbytes = 0
        self.large: dict[int, tuple[Tensor, Place]] = {}

    def persistent_id(self, content: object) -> Place | None:
        if type(content) is not Tensor or content.device.type != "cpu" or content.layout is not torch.strided:
            return None
        if content.nbytes < LARGE_BYTES or content.requires_grad:
            return None
        if id(content) not in self.large:
            self.large[id(content)] = (content, (self.nbytes, content.shape, content.dtype))
            self.nbytes += -(-content.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return self.large[id(content)][1]


class _Unpacker(pickle.Unpickler):
    def __init__(self, text: io.BytesIO, memory: mmap.mmap) -> None:
        super().__init__(text)
        self._memory = memory

    def persistent_load(self, place: Place) -> Tensor:
        offset, shape, dtype = place
        return _flat(self._memory, offset, dtype, shape.numel()).view(shape)


def _flat(memory: mmap.mmap, offset: int, dtype: torch.dtype, count: int) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
