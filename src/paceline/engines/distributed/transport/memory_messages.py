"""Messages about memory that processes of one host share."""

from __future__ import annotations

from typing import NamedTuple

from paceline.engines.distributed.transport.task_messages import MessageStruct


class SharedFile(NamedTuple):
    """File in memory that a process has open.

    Attributes:
        process: process id.
        descriptor: descriptor of the file in that process.
        key: what the file begins with.
    """

    process: int
    descriptor: int
    key: bytes


class MemoryOffered(MessageStruct, frozen=True, kw_only=True):
    """Rank 0 shares its memory with a worker or the server of a shard, if that is on its host and can open it.

    Attributes:
        versions: file of the versions.
        slots: number of versions in it.
        gradient: file of the worker's gradient; None for the server of a shard.
    """

    versions: SharedFile
    slots: int
    gradient: SharedFile | None


class MemoryMapped(MessageStruct, frozen=True):
    """Answer to `MemoryOffered`.

    Attributes:
        is_mapped: whether the process has mapped the memory.
    """

    is_mapped: bool


class GradientMapped(MessageStruct, frozen=True):
    """A worker has mapped the file of its gradient, of which the server of a shard reads its part.

    Attributes:
        peer_id: id of the worker at rank 0.
        gradient: file of the gradient.
    """

    peer_id: int
    gradient: SharedFile


MemoryMessage = MemoryOffered | MemoryMapped | GradientMapped
