"""Interface of a wire: what becomes of parameters and gradients between two processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

from torch import Tensor

from paceline.engines.distributed.transport.buckets import Bucket
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.tensors.version_store import VersionStore


class VersionMessages(ABC):
    """Messages that bring other processes to the versions of a store."""

    @abstractmethod
    def packed(self, version: int) -> Tensor:
        """Return the wire memory of a version that is in use."""

    @abstractmethod
    def message(self, peer_id: int, version: int) -> tuple[list[tuple[int, Tensor]], bool]:
        """Return the numbered buckets that bring a process to a version, and whether they are a difference."""

    @abstractmethod
    def held_by(self, peer_id: int, version: int) -> Tensor:
        """Return the wire memory of a version as a process has received it."""

    @abstractmethod
    def forget(self, peer_id: int) -> None:
        """Forget what a process has, which is gone."""


class Wire(ABC):
    """Conversion of vectors of one layout to the bytes on the wire, and back.

    Attributes:
        nbytes: bytes on the wire.
        buckets: buckets of a gradient, in the order in which a backward pass usually completes them.
        parameters: range of each parameter on the wire.
    """

    nbytes: int
    buckets: list[Bucket]
    parameters: list[Bucket]

    @abstractmethod
    def allocate(self, vectors: FlatBuffers) -> Tensor:
        """Return wire memory for vectors, uint8 [nbytes], which may be their own memory."""

    @abstractmethod
    def remainder(self) -> FlatBuffers | None:
        """Return memory for what messages leave out, zeros at first; None if they leave nothing out."""

    @abstractmethod
    def pack(
        self, vectors: FlatBuffers, memory: Tensor, bucket: Bucket | None = None, left_out: FlatBuffers | None = None
    ) -> None:
        """Convert vectors, or one bucket of them, to wire memory.

        Args:
            vectors: vectors, finite if a code is used.
            memory: wire memory.
            bucket: one of the buckets; None for all.
            left_out: what earlier messages have left out, if any do: a part of this one.
        """

    @abstractmethod
    def unpack(self, memory: Tensor, vectors: FlatBuffers, bucket: Bucket | None = None) -> None:
        """Convert wire memory, or one bucket of it, to vectors."""

    @abstractmethod
    def overflows(self, memory: Tensor, squared_norm: float) -> bool:
        """Return whether packing a finite gradient of this squared norm has made a number of it infinite."""

    @abstractmethod
    def messages_of(self, versions: VersionStore) -> VersionMessages:
        """Return the messages for versions of a store."""

    @abstractmethod
    def receivers(self, memory: Tensor, vectors: FlatBuffers) -> list[Tensor]:
        """Return the memory into which each numbered bucket of a version is received."""

    @abstractmethod
    def unpack_version(self, memory: Tensor, vectors: FlatBuffers, *, is_difference: bool) -> None:
        """Convert a version that has been received, or add it to the version before."""

    @abstractmethod
    def packed_version(self, memory: Tensor, vectors: FlatBuffers) -> Tensor:
        """Return a received version as it is now, as `VersionMessages.held_by` does at the sender."""


class WireBuffer:
    """Vectors at one end of a connection, and their wire memory.

    Args:
        wire: wire.
        vectors: vectors at this end.

    Attributes:
        vectors: as given.
        memory: wire memory, uint8 [nbytes].
        buckets: views of the wire memory, one for each bucket.
    """

    def __init__(self, wire: Wire, vectors: FlatBuffers) -> None:
        self._wire = wire
        self.vectors = vectors
        self.memory = wire.allocate(vectors)
        self.buckets = [bucket.of(self.memory) for bucket in wire.buckets]

    def pack(self, number: int | None = None) -> None:
        """Convert the vectors, or one bucket of them, before they are sent; a codec keeps the rest for next time."""
        self._wire.pack(self.vectors, self.memory, self._bucket(number), self.left_out)

    def unpack(self, number: int | None = None) -> None:
        """Convert the vectors, or one bucket of them, after they have been received."""
        self._wire.unpack(self.memory, self.vectors, self._bucket(number))

    def overflows(self, squared_norm: float) -> bool:
        """Return whether packing a finite gradient has made a number of it infinite."""
        return self._wire.overflows(self.memory, squared_norm)

    @cached_property
    def left_out(self) -> FlatBuffers | None:
        """What the messages of a codec have left out so far; None if messages leave nothing out."""
        return self._wire.remainder()

    def _bucket(self, number: int | None) -> Bucket | None:
        return None if number is None else self._wire.buckets[number]
