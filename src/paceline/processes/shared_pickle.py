"""Object for many child processes: pickled once, with large arrays in memory that all of them map."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
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
SPAWNED_MAIN = "__mp_main__"  # the main module in a process that multiprocessing has spawned
Segment = tuple[int, torch.Size, torch.dtype]

_unpickling = False  # whether this process is unpickling, and so importing modules


class SharedPickle:
    """Pickled object; tensors and NumPy arrays of 1 MiB and more are passed on as one file descriptor.

    Functions and classes of `__main__` (a script, a notebook, an interactive session), lambdas and closures are
    pickled by value, with the globals that they use; those of an importable module by name. The pickle is loaded only
    by child processes on the same machine, never from a network or a file.

    A process may write to the arrays that it loads: written pages are copied for it.

    Raises:
        Exception: any error of pickle or of an object's own `__reduce__`.
    """

    def __init__(self, content: object) -> None:
        stream = io.BytesIO()
        pickler = ArrayPickler(stream)
        pickler.dump(content)
        self._pickle = stream.getvalue()
        self._nbytes = max(1, pickler.nbytes)
        self._buffers = [(offset, buffer.nbytes) for offset, buffer in pickler.buffers]
        self._file = anonymous_file(self._nbytes)
        memory = mmap.mmap(self._file, self._nbytes)
        for tensor, (offset, _, _) in pickler.large.values():
            _flat(memory, offset, tensor.dtype, tensor.numel()).copy_(tensor.detach().reshape(-1))
        for offset, buffer in pickler.buffers:
            memory[offset : offset + buffer.nbytes] = buffer

    def __getstate__(self) -> dict[str, Any]:
        return {"pickle": self._pickle, "nbytes": self._nbytes, "buffers": self._buffers, "file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._pickle = state["pickle"]
        self._nbytes = state["nbytes"]
        self._buffers = state["buffers"]
        self._file = state["file"].detach()

    def load(self) -> Any:
        """Return the object; its large arrays share all unwritten pages with the other processes."""
        memory = mmap.mmap(self._file, self._nbytes, access=mmap.ACCESS_COPY)
        self.close()
        view = memoryview(memory)
        buffers = [view[offset : offset + nbytes] for offset, nbytes in self._buffers]
        with _marked_as_unpickling():
            return _Unpacker(io.BytesIO(self._pickle), memory, buffers).load()

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self._file)


def refuse_while_unpickling() -> None:
    """Refuse to train in a process that is importing modules named in a pickle.

    Raises:
        UsageError: such a module trains while it is imported.
    """
    if _unpickling:
        raise UsageError(
            "a module that defines a part of the job trains when it is imported, and every worker process imports it; "
            "put that call under if __name__ == '__main__':"
        )


def by_value(content: object) -> bytes:
    """Return an object pickled by value, for processes that a launcher such as Ray starts for this one.

    Raises:
        Exception: any error of pickle or of an object's own `__reduce__`.
    """
    stream = io.BytesIO()
    ValuePickler(stream).dump(content)
    return stream.getvalue()


def from_value(data: bytes) -> Any:
    """Return the object that `by_value` has pickled."""
    with _marked_as_unpickling():
        return ValueUnpickler(io.BytesIO(data)).load()


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickler of functions and classes of the main module by value, also of cached functions and in a child process."""

    def __init__(self, stream: Any, buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffer_callback)
        if SPAWNED_MAIN in sys.modules:
            cloudpickle.register_pickle_by_value(sys.modules[SPAWNED_MAIN])

    def reducer_override(self, content: Any) -> Any:
        """Return how to rebuild an object: a cached function of `__main__` from the function that it wraps."""
        if isinstance(content, _CACHED) and content.__module__ in ("__main__", SPAWNED_MAIN):  # else pickled by name
            return _cached, (content.__wrapped__, content.cache_parameters())
        return super().reducer_override(content)


class ArrayPickler(ValuePickler):
    """Pickler that leaves out large arrays and assigns each a page-aligned segment.

    Attributes:
        nbytes: bytes of all segments.
        large: tensors left out and their segments, by identity.
        buffers: offsets and bytes of the NumPy arrays left out.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream, self._is_small)
        self.nbytes = 0
        self.large: dict[int, tuple[Tensor, Segment]] = {}
        self.buffers: list[tuple[int, memoryview]] = []

    def persistent_id(self, content: object) -> Segment | None:
        """Return the segment of a large tensor, None for an object inside the pickle."""
        if type(content) is not Tensor or content.device.type != "cpu" or content.layout is not torch.strided:
            return None
        if content.nbytes < LARGE_BYTES or content.requires_grad:
            return None
        if id(content) not in self.large:
            # The tensor is kept, so that no other object gets its id.
            self.large[id(content)] = (content, (self._reserve(content.nbytes), content.shape, content.dtype))
        return self.large[id(content)][1]

    def _is_small(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether a buffer stays inside the pickle; leave a large one out."""
        raw = buffer.raw()
        if raw.nbytes < LARGE_BYTES:
            return True
        self.buffers.append((self._reserve(raw.nbytes), raw))
        return False

    def _reserve(self, nbytes: int) -> int:
        offset = self.nbytes
        self.nbytes += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return offset


class ValueUnpickler(pickle.Unpickler):
    """Unpickler of what `ValuePickler` has written."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an object that was pickled by name."""
        if module == "__main__":
            raise UsageError(
                f"{name} was pickled by its name in the main module, which worker processes do not import; "
                "define it in another module and import it"
            )
        return super().find_class(module, name)


class _Unpacker(ValueUnpickler):
    def __init__(self, stream: io.BytesIO, memory: mmap.mmap, buffers: list[memoryview]) -> None:
        super().__init__(stream, buffers=buffers)
        self._memory = memory

    def persistent_load(self, segment: Segment) -> Tensor:
        offset, shape, dtype = segment
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
