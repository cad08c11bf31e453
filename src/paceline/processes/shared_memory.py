"""Anonymous shared memory of all processes of a run; the system frees it with the last of them."""

from __future__ import annotations

import mmap
import os
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any

import torch

from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout

PAGE_BYTES = mmap.PAGESIZE
WORD_BYTES = 8


class SharedBuffers(FlatBuffers):
    """Flat buffers in shared memory.

    Attributes:
        slot: number of their slot for versions, by which other processes find them.
    """

    def __init__(self, layout: FlatLayout, memory: torch.Tensor, slot: int) -> None:
        super().__init__(layout, memory)
        self.slot = slot


class SharedMemory:
    """Shared memory of a run: per worker a cancellation word and a gradient, and slots for versions.

    Only written pages take memory. The memory is passed on as a file descriptor; it has no name in a file system, so a
    crash leaves nothing behind.

    Args:
        layout: layout of the model.
        workers: largest number of workers, >= 1.
        slots: number of versions, >= 1.
    """

    def __init__(self, layout: FlatLayout, workers: int, slots: int) -> None:
        self._sizes = (workers, slots, whole_pages(layout.nbytes))
        self._map(anonymous_file(self._nbytes))

    def __getstate__(self) -> dict[str, Any]:
        return {"sizes": self._sizes, "file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._sizes = state["sizes"]
        self._map(state["file"].detach())

    def gradient(self, layout: FlatLayout, worker: int) -> FlatBuffers:
        """Return the flat buffers of a worker's gradient."""
        return FlatBuffers(layout, self._view(layout, worker))

    def version(self, layout: FlatLayout, slot: int) -> SharedBuffers:
        """Return the flat buffers of a slot for versions."""
        workers, _, _ = self._sizes
        return SharedBuffers(layout, self._view(layout, workers + slot), slot)

    def interrupt(self, worker: int, draw: int) -> None:
        """Cancel a worker's tasks up to this draw."""
        self._interrupted[worker] = draw

    def is_interrupted(self, worker: int, draw: int) -> bool:
        """Return whether a worker's task of this draw is cancelled."""
        return self._interrupted[worker] >= draw

    def close(self) -> None:
        """Close the file descriptor; existing mappings stay valid."""
        os.close(self._file)

    @property
    def _nbytes(self) -> int:
        workers, slots, nbytes = self._sizes
        return whole_pages(workers * WORD_BYTES) + (workers + slots) * nbytes

    def _map(self, file: int) -> None:
        workers, _, _ = self._sizes
        self._file = file
        self._memory = mmap.mmap(file, self._nbytes)
        self._interrupted = memoryview(self._memory)[: workers * WORD_BYTES].cast("q")

    def _view(self, layout: FlatLayout, index: int) -> torch.Tensor:
        workers, _, nbytes = self._sizes
        offset = whole_pages(workers * WORD_BYTES) + index * nbytes
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=layout.nbytes, offset=offset)


def anonymous_file(nbytes: int) -> int:
    """Return the descriptor of an unnamed file of this size in memory."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("paceline")
    else:
        file, path = tempfile.mkstemp(prefix="paceline-")
        os.unlink(path)
    os.ftruncate(file, nbytes)
    return file


def whole_pages(nbytes: int) -> int:
    """Return the bytes of the pages that hold this number of bytes."""
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
