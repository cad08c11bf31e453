"""Memory that a server shares with the workers of its host: its versions, and the gradient of each worker."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from secrets import token_bytes

import torch
from torch import nn

from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed.transport.memory_messages import MemoryOffered, SharedFile
from paceline.processes.shared_memory import PAGE_BYTES, SharedBuffers, anonymous_file, whole_pages
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout

KEY_BYTES = 16
PROC = Path("/proc/self/fd")  # by which a process opens a file of another one


class MappedFile:
    """Unnamed file in memory: a page with its key, and slots of the vectors of a whole model.

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

    def vectors(self, slot: int = 0, shard: int | None = None) -> SharedBuffers:
        """Return the vectors of a slot, or those of a shard in it."""
        layout = self._layout if shard is None else self._layout.shard_layouts[shard]
        start = 0 if shard is None else self._layout.shard_ranges[shard].start
        offset = PAGE_BYTES + slot * whole_pages(self._layout.nbytes) + start
        memory = torch.frombuffer(self._memory, dtype=torch.uint8, count=layout.nbytes, offset=offset)
        return SharedBuffers(layout, memory, slot)


class VersionSlots:
    """Storage of the versions of a shard in the slots of a file.

    The servers of all shards publish and release the same versions in the same order. So each version has the same slot
    at all of them.

    Args:
        file: file with the versions.
        layout: layout of the model.
        slots: number of versions in the file; the storage of others is not shared.
        shard: number of the shard.
    """

    def __init__(self, file: MappedFile, layout: FlatLayout, slots: int, shard: int) -> None:
        self._file = file
        self._layout = layout.shard_layouts[shard]
        self._shard = shard
        self._unused = iter(range(slots))

    def allocate(self) -> FlatBuffers:
        """Return storage for a version."""
        slot = next(self._unused, None)
        return self._layout.allocate() if slot is None else self._file.vectors(slot, self._shard)


class HostMemory:
    """Memory of a server that the workers of its host map, and the servers of the other shards.

    A process opens a file by the descriptor that the server has of it, which only a process of the same user on this
    host can. Nothing has a name, so nothing is left when all are killed. Each process has a file of its own for its
    gradient: one that was given up, and writes on, does not reach the next process with its number.

    Args:
        layout: layout of the model, with all shards.
        slots: number of versions that workers can map; the storage of others is not shared.

    Attributes:
        is_shared: whether processes may map it.
    """

    def __init__(self, layout: FlatLayout, slots: int) -> None:
        self.is_shared = True
        self._layout = layout
        self._slots = slots
        self._file = anonymous_file(nbytes_of(layout, slots))
        self._versions = MappedFile(self._file, layout, slots)
        self._versions.key = token_bytes(KEY_BYTES)
        self._storage = VersionSlots(self._versions, layout, slots, shard=0)
        self._files: dict[int, SharedFile] = {}  # of the gradient of each process, by peer id
        self._offered: dict[int, MappedFile] = {}  # of those that have not mapped it
        self._gradients: dict[int, FlatBuffers] = {}  # of the others: the part of this server

    def allocate(self) -> FlatBuffers:
        """Return storage for a version."""
        return self._storage.allocate()

    def offer(self, peer_id: int) -> MemoryOffered:
        """Return what a process needs to map the versions, and a new gradient."""
        self.forget(peer_id)
        file = anonymous_file(nbytes_of(self._layout, 1))
        gradient = self._offered[peer_id] = MappedFile(file, self._layout, 1)
        gradient.key = token_bytes(KEY_BYTES)
        self._files[peer_id] = SharedFile(os.getpid(), file, gradient.key)
        return self._offer(self._files[peer_id])

    def offer_versions(self) -> MemoryOffered:
        """Return what the server of another shard needs to map the versions."""
        return self._offer(None)

    def _offer(self, gradient: SharedFile | None) -> MemoryOffered:
        versions = SharedFile(os.getpid(), self._file, self._versions.key)
        return MemoryOffered(versions=versions, slots=self._slots, gradient=gradient)

    def mapped(self, peer_id: int) -> SharedFile:
        """Note that a process has mapped its gradient, and return the file of it.

        Raises:
            ValueError: none was offered.
        """
        if peer_id not in self._offered:
            raise ValueError("it has mapped memory that was not offered")
        self._gradients[peer_id] = self._offered.pop(peer_id).vectors(shard=0)
        return self._files[peer_id]

    def gradient(self, peer_id: int) -> FlatBuffers | None:
        """Return the gradient of a process, the part of the first shard; None if it has not mapped it."""
        return self._gradients.get(peer_id)

    def forget(self, peer_id: int) -> None:
        """Forget the gradient of a process that is gone."""
        self._offered.pop(peer_id, None)
        self._gradients.pop(peer_id, None)
        if (file := self._files.pop(peer_id, None)) is not None:
            os.close(file.descriptor)

    def close(self) -> None:
        """Close all files; existing mappings stay valid."""
        for peer_id in list(self._files):
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
        assert offer.gradient is not None
        self._versions = open_shared(offer.versions, layout, offer.slots)
        self.gradient: FlatBuffers = open_shared(offer.gradient, layout).vectors()
        self._known: dict[int, FlatBuffers] = {}

    def version(self, slot: int) -> FlatBuffers:
        """Return the storage of a version."""
        if slot not in self._known:
            self._known[slot] = self._versions.vectors(slot)
        return self._known[slot]


class OfferedShard:
    """Part of a shard in the memory of rank 0, as the server of the shard has mapped it.

    Args:
        offer: what rank 0 has offered.
        layout: layout of the model, with all shards.
        shard: number of the shard.

    Raises:
        OSError: it is not of this host and this user.
    """

    def __init__(self, offer: MemoryOffered, layout: FlatLayout, shard: int) -> None:
        self._layout = layout
        self._shard = shard
        self._storage = VersionSlots(open_shared(offer.versions, layout, offer.slots), layout, offer.slots, shard)

    def allocate(self) -> FlatBuffers:
        """Return storage for a version."""
        return self._storage.allocate()

    def gradient(self, file: SharedFile) -> FlatBuffers:
        """Return the shard's part of the gradient of a worker.

        Raises:
            OSError: the worker is gone.
        """
        return open_shared(file, self._layout).vectors(shard=self._shard)


def host_memory_of(cluster: Torchrun, model: nn.Module) -> HostMemory | None:
    """Return memory that the server of a cluster shares with the workers of its host; None if it shares none.

    Not with hosts as workers. A wire that rounds is one that the results shall show, and in debug mode each process has
    a copy to compare with.
    """
    is_plain = cluster.workers == "process" and cluster.wire == "float32"
    if not (cluster.share_memory and is_plain and cluster.has_server) or cluster.debug or not PROC.exists():
        return None
    # As many versions as the workers can read, as in `LocalWorkers`.
    return HostMemory(FlatLayout(model, cluster.shards), slots=3 * cluster.n + 4)


def map_offered(offer: MemoryOffered, layout: FlatLayout) -> OfferedMemory | None:
    """Return the memory that a server has offered; None on another host, or for another user."""
    with suppress(OSError):
        return OfferedMemory(offer, layout)
    return None


def nbytes_of(layout: FlatLayout, slots: int) -> int:
    """Return the bytes of a file."""
    return PAGE_BYTES + slots * whole_pages(layout.nbytes)


def open_shared(shared: SharedFile, layout: FlatLayout, slots: int = 1) -> MappedFile:
    """Return a file of another process of this host.

    Raises:
        OSError: it is not of this host and this user, or is closed already.
    """
    opened = os.open(f"/proc/{shared.process}/fd/{shared.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != nbytes_of(layout, slots):
            raise OSError("another file")
        mapped = MappedFile(opened, layout, slots)
    finally:
        os.close(opened)
    if mapped.key != shared.key:
        raise OSError("another file")
    return mapped
