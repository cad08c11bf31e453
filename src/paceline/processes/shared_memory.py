"""Anonymous memory that all processes of a run map; it is gone when the last of them is gone."""

from __future__ import annotations

import mmap
import os
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any

import torch

from paceline.server.flat_buffers import FlatBuffers, FlatLayout

PAGE_BYTES = mmap.PAGESIZE
WORD_BYTES = 8


class SharedVectors(FlatBuffers):
    """Vectors in shared memory.

    Attributes:
        place: their number among the places for versions, by which other processes find them.
    """

    def __init__(self, layout: FlatLayout, memory: torch.Tensor, place: int) -> None:
        super().__init__(layout, memory)
        self.place = place


class SharedMemory:
    """The memory of a run: a word a worker for interrupts, a gradient a worker, and places for versions.

    Only pages that have been written take memory. It is passed on as a file descriptor and has no name that a
    crash could leave behind.

    Args:
        layout: of the model.
        workers: at most.
        places: for versions.
    """

    def __init__(self, layout: FlatLayout, workers: int, places: int) -> None:
        self._sizes = (workers, places, _pages(layout.nbytes))
        self._map(anonymous_file(self._nbytes))

    def __getstate__(self) -> dict[str, Any]:
        return {"sizes": self._sizes, "file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._sizes = state["sizes"]
        self._map(state["file"].detach())

    def gradient(self, layout: FlatLayout, worker: int) -> FlatBuffers:
        """Return where a worker writes its gradient."""
        return FlatBuffers(layout, self._piece(layout, worker))

    def version(self, layout: FlatLayout, place: int) -> SharedVectors:
        """Return a place for a version."""
        workers, _, _ = self._sizes
        return SharedVectors(layout, self._piece(layout, workers + place), place)

    def interrupt(self, worker: int, draw: int) -> None:
        """Tell a worker to abandon its work up to this draw."""
        self._interrupted[worker] = draw

    def is_interrupted(self, worker: int, draw: int) -> bool:
        """Return whether a worker is to abandon this draw."""
        return self._interrupted[worker] >= draw

    def close(self) -> None:
        """Let the file go; what is mapped stays until nobody uses it."""
        os.close(self._file)

    @property
    def _nbytes(self) -> int:
        workers, places, piece = self._sizes
        return _pages(workers * WORD_BYTES) + (workers + places) * piece

    def _map(self, file: int) -> None:
        workers, _, _ = self._sizes
        self._file = file
        self._memory = mmap.mmap(file, self._nbytes)
        self._interrupted = memoryview(self._memory)[: workers * WORD_BYTES].cast("q")

    def _piece(self, layout: FlatLayout, index: int) -> torch.Tensor:
        workers, _, piece = self._sizes
        offset = _pages(workers * WORD_BYTES) + index * piece
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=layout.nbytes, offset=offset)


def anonymous_file(nbytes: int) -> int:
    """Return the descriptor of a file in memory, of this size, that has no name."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("paceline")
    else:
        file, path = tempfile.mkstemp(prefix="paceline-")
        os.unlink(path)
    os.ftruncate(file, nbytes)
    return file


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
