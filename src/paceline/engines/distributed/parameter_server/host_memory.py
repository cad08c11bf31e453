"""Memory that a server shares with the workers of its host: its versions, and the gradient of each worker."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from secrets import token_bytes

import torch

from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed.transport.task_messages import MemoryOffered
from paceline.processes.shared_memory import PAGE_BYTES, SharedBuffers, anonymous_file, whole_pages
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout

KEY_BYTES = 16
PROC = Path("/proc/self/fd")  # by which a process opens a file of another one


class MappedFile:
    """Unnamed file in memory: a page with its key, and slots of vectors.

    The key tells the file from one of another host that has the same process id.

    Args:
        file: descriptor of the file.
        layout: layout of the vectors.
        slots: number of slots.
    """

    def __init__(self, file: int, layout: FlatLayout, slots: int) -> None:
        self._layout = layout
        self._memory = mmap.mmap(file, nbytes_of(layout, slots))

    @property
    def key(self) -> bytes:
        """Key of the file."""
        return self._memory[:KEY_BYTES]

    @key.setter
    def key(self, key: bytes) -> None:
        self._memory[:KEY_BYTES] = key

    def vectors(self, slot: int = 0) -> SharedBuffers:
        """Return the vectors of a slot."""
        nbytes = self._layout.nbytes
        offset = PAGE_BYTES + slot * whole_pages(nbytes)
        memory = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)
        return SharedBuffers(self._layout, memory, slot)


class HostMemory:
    """Memory of a server that the workers of its host map.

    A process opens a file by the descriptor that the server has of it, which only a process of the same user on this
    host can. Nothing has a name, so nothing is left when all are killed. Each process has a file of its own for its
    gradient: one that was given up, and writes on, does not reach the next process with its number.

    Args:
        layout: layout of the model.
        slots: number of versions that workers can map; the storage of others is not shared.
    """

    def __init__(self, layout: FlatLayout, slots: int) -> None:
        self._layout = layout
        self._slots = slots
        self._unused = iter(range(slots))
        self._file = anonymous_file(nbytes_of(layout, slots))
        self._versions = MappedFile(self._file, layout, slots)
        self._versions.key = token_bytes(KEY_BYTES)
        self._offered: dict[int, int] = {}  # file of the gradient of each process that has not mapped it, by peer id
        self._gradients: dict[int, MappedFile] = {}

    def allocate(self) -> FlatBuffers:
        """Return storage for a version."""
        slot = next(self._unused, None)
        return self._layout.allocate() if slot is None else self._versions.vectors(slot)

    def offer(self, peer_id: int) -> MemoryOffered:
        """Return what a process needs to map the versions, and a new gradient."""
        self.forget(peer_id)
        file = self._offered[peer_id] = anonymous_file(nbytes_of(self._layout, 1))
        gradient = self._gradients[peer_id] = MappedFile(file, self._layout, 1)
        gradient.key = token_bytes(KEY_BYTES)
        return MemoryOffered(
            process=os.getpid(),
            versions=self._file,
            versions_key=self._versions.key,
            slots=self._slots,
            gradient=file,
            gradient_key=gradient.key,
        )

    def mapped(self, peer_id: int) -> FlatBuffers:
        """Return the gradient of a process, which has mapped it.

        Raises:
            ValueError: none was offered.
        """
        file = self._offered.pop(peer_id, None)
        if file is None:
            raise ValueError("it has mapped memory that was not offered")
        os.close(file)
        return self._gradients[peer_id].vectors()

    def forget(self, peer_id: int) -> None:
        """Forget the gradient of a process that is gone."""
        self._gradients.pop(peer_id, None)
        if (file := self._offered.pop(peer_id, None)) is not None:
            os.close(file)

    def close(self) -> None:
        """Close all files; existing mappings stay valid."""
        for peer_id in list(self._offered):
            self.forget(peer_id)
        os.close(self._file)


class OfferedMemory:
    """Memory of a server on this host, as a worker has mapped it.

    Args:
        offer: what the server has offered.
        layout: layout of the model.

    Attributes:
        gradient: memory for the gradient of this worker.

    Raises:
        OSError: it is not of this host and this user.
    """

    def __init__(self, offer: MemoryOffered, layout: FlatLayout) -> None:
        files = (offer.versions, offer.versions_key, offer.slots), (offer.gradient, offer.gradient_key, 1)
        self._versions, gradients = (_opened(offer.process, file, key, layout, slots) for file, key, slots in files)
        self.gradient: FlatBuffers = gradients.vectors()
        self._known: dict[int, FlatBuffers] = {}

    def version(self, slot: int) -> FlatBuffers:
        """Return the storage of a version."""
        if slot not in self._known:
            self._known[slot] = self._versions.vectors(slot)
        return self._known[slot]


def host_memory_of(cluster: Torchrun, layout: FlatLayout) -> HostMemory | None:
    """Return memory that the server of a cluster shares with the workers of its host; None if it shares none.

    Not with several shards, whose parts of a gradient are at several servers, nor with hosts as workers. A wire that
    rounds is one that the results shall show, and in debug mode each process has a copy to compare with.
    """
    is_plain = cluster.shards == 1 and cluster.workers == "process" and cluster.wire == "float32"
    if not (cluster.share_memory and is_plain and cluster.has_server) or cluster.debug or not PROC.exists():
        return None
    return HostMemory(layout, slots=3 * cluster.n + 4)  # as many as the workers can read, as in `LocalWorkers`


def map_offered(offer: MemoryOffered, layout: FlatLayout) -> OfferedMemory | None:
    """Return the memory that a server has offered; None on another host, or for another user."""
    with suppress(OSError):
        return OfferedMemory(offer, layout)
    return None


def nbytes_of(layout: FlatLayout, slots: int) -> int:
    """Return the bytes of a file."""
    return PAGE_BYTES + slots * whole_pages(layout.nbytes)


def _opened(process: int, file: int, key: bytes, layout: FlatLayout, slots: int) -> MappedFile:
    opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != nbytes_of(layout, slots):
            raise OSError("another file")
        mapped = MappedFile(opened, layout, slots)
    finally:
        os.close(opened)
    if mapped.key != key:
        raise OSError("another file")
    return mapped
