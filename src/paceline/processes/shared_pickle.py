"""An object for many child processes: pickled once, its large arrays in memory that all of them map."""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.reduction import DupFd
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.processes.shared_memory import anonymous_file

LARGE_BYTES = 1 << 20
Place = tuple[int, torch.Size, torch.dtype]

_unpickling = False  # whether this process unpickles a parcel at present, and with it imports modules


class SharedPickle:
    """Pickled object; tensors and NumPy arrays of 1 MiB and more travel as one file descriptor.

    Functions and classes of `__main__` (a script, a notebook, an interactive session), lambdas and closures are
    pickled by value, with the globals that they use; those of an importable module by name. Only a process of this
    machine that this process has started opens a parcel: it is never read from a network or a file.

    Each process may write to the arrays that it opens: the pages written become its own.

    Raises:
        Exception: any error of pickle or of an object's own `__reduce__`.
    """

    def __init__(self, content: object) -> None:
        text = io.BytesIO()
        packer = Packer(text)
        packer.dump(content)
        self._text = text.getvalue()
        self._nbytes = max(1, packer.nbytes)
        self._buffers = [(offset, buffer.nbytes) for offset, buffer in packer.buffers]
        self._file = anonymous_file(self._nbytes)
        memory = mmap.mmap(self._file, self._nbytes)
        for tensor, (offset, _, _) in packer.large.values():
            _flat(memory, offset, tensor.dtype, tensor.numel()).copy_(tensor.detach().reshape(-1))
        for offset, buffer in packer.buffers:
            memory[offset : offset + buffer.nbytes] = buffer

    def __getstate__(self) -> dict[str, Any]:
        return {"text": self._text, "nbytes": self._nbytes, "buffers": self._buffers, "file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._text, self._nbytes, self._buffers = state["text"], state["nbytes"], state["buffers"]
        self._file = state["file"].detach()

    def open(self) -> Any:
        """Return the object; its large arrays share their pages with every other process that has not written them."""
        memory = mmap.mmap(self._file, self._nbytes, access=mmap.ACCESS_COPY)
        self.close()
        view = memoryview(memory)
        buffers = [view[offset : offset + nbytes] for offset, nbytes in self._buffers]
        with _marked_as_unpickling():
            return _Unpacker(io.BytesIO(self._text), memory, buffers).load()

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self._file)


def refuse_while_unpickling() -> None:
    """Refuse to train in a process that imports modules because a parcel names them.

    Raises:
        UsageError: such a module trains while it is imported.
    """
    if _unpickling:
        raise UsageError(
            "a module that defines a part of the job trains while it is imported, and every worker process imports "
            "it; put that call under if __name__ == '__main__':"
        )


class Packer(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickler that leaves large arrays out and assigns each a page-aligned place.

    Attributes:
        nbytes: of all places.
        large: by identity, each tensor left out and its place.
        buffers: offset and bytes of each NumPy array left out.
    """

    def __init__(self, text: Any) -> None:
        super().__init__(text, protocol=5, buffer_callback=self._keeps_in_text)
        self.nbytes = 0
        self.large: dict[int, tuple[Tensor, Place]] = {}
        self.buffers: list[tuple[int, memoryview]] = []

    def persistent_id(self, content: object) -> Place | None:
        """Return the place of a large tensor, None for what is pickled into the text."""
        if type(content) is not Tensor or content.device.type != "cpu" or content.layout is not torch.strided:
            return None
        if content.nbytes < LARGE_BYTES or content.requires_grad:
            return None
        if id(content) not in self.large:
            self.large[id(content)] = (content, (self._reserve(content.nbytes), content.shape, content.dtype))
        return self.large[id(content)][1]

    def reducer_override(self, content: Any) -> Any:
        """Return how to make an object anew: a cached function from the function that it wraps."""
        if isinstance(content, _CACHED) and content.__module__ == "__main__":  # it would be pickled by its name
            return _cached, (content.__wrapped__, content.cache_parameters())
        return super().reducer_override(content)

    def _keeps_in_text(self, buffer: pickle.PickleBuffer) -> bool:
        """Leave a large buffer out; return whether it belongs into the text."""
        raw = buffer.raw()
        if raw.nbytes < LARGE_BYTES:
            return True
        self.buffers.append((self._reserve(raw.nbytes), raw))
        return False

    def _reserve(self, nbytes: int) -> int:
        offset = self.nbytes
        self.nbytes += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return offset


class _Unpacker(pickle.Unpickler):
    def __init__(self, text: io.BytesIO, memory: mmap.mmap, buffers: list[memoryview]) -> None:
        super().__init__(text, buffers=buffers)
        self._memory = memory

    def find_class(self, module: str, name: str) -> Any:
        """Return what is pickled by its name."""
        if module == "__main__":
            raise UsageError(
                f"{name} is pickled by its name in the main module, which worker processes do not import: define it in "
                "a module of its own, and import that"
            )
        return super().find_class(module, name)

    def persistent_load(self, place: Place) -> Tensor:
        offset, shape, dtype = place
        return _flat(self._memory, offset, dtype, shape.numel()).view(shape)


_CACHED = type(lru_cache()(int))


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return lru_cache(**parameters)(function)


@contextmanager
def _marked_as_unpickling() -> Iterator[None]:
    global _unpickling
    _unpickling = True
    try:
        yield
    finally:
        _unpickling = False


def _flat(memory: mmap.mmap, offset: int, dtype: torch.dtype, count: int) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
