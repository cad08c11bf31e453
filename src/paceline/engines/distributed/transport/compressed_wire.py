"""Compressed wire: gradients with error feedback, versions as differences to what a process has."""

from __future__ import annotations

from torch import Tensor

from paceline.compression.compressed_vectors import CompressedFormat
from paceline.core.wire import Code
from paceline.engines.distributed.transport.buckets import Bucket
from paceline.engines.distributed.transport.wire import VersionMessages, Wire
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.tensors.version_store import VersionStore

WHOLE = 1  # number of the bucket of a whole version, for a process that has none to add a difference to


class CompressedWire(Wire):
    """Compressed vectors in one bucket, because a code needs whole blocks.

    Args:
        code: code of the parameters; this and the next arguments are those of `CompressedFormat`.
        layout: layout of the vectors.
        loads_numba: whether this process loads numba.
    """

    def __init__(self, code: Code, layout: FlatLayout, *, loads_numba: bool = False) -> None:
        self._layout = layout
        self._format = CompressedFormat(code, layout, loads_numba=loads_numba)
        self.nbytes = self._format.nbytes
        self.buckets = [Bucket(0, self.nbytes)]
        self.parameters = self.buckets * len(layout.parameters)

    def allocate(self, vectors: FlatBuffers) -> Tensor:
        """Return wire memory, uint8 [nbytes]."""
        return self._format.allocate(vectors)

    def remainder(self) -> FlatBuffers:
        """Return memory for what messages leave out."""
        return self._layout.allocate()

    def pack(
        self, vectors: FlatBuffers, memory: Tensor, bucket: Bucket | None = None, left_out: FlatBuffers | None = None
    ) -> None:
        """Write the code of finite vectors and of what was left out so far."""
        assert left_out is not None
        self._format.compress(vectors, left_out, memory)

    def unpack(self, memory: Tensor, vectors: FlatBuffers, bucket: Bucket | None = None) -> None:
        """Decode a gradient."""
        self._format.decompress(memory, vectors)

    def overflows(self, memory: Tensor, squared_norm: float) -> bool:
        """Return False: a code has a scale of its own."""
        return False

    def messages_of(self, versions: VersionStore) -> VersionMessages:
        """Return the differences of versions to what each process has."""
        return _VersionDifferences(self._format, versions)

    def receivers(self, memory: Tensor, vectors: FlatBuffers) -> list[Tensor]:
        """Return the wire memory of a difference, and the vectors themselves for a whole version."""
        return [memory, vectors.memory]

    def unpack_version(self, memory: Tensor, vectors: FlatBuffers, *, is_difference: bool) -> None:
        """Add a difference to the vectors; a whole version is there already."""
        if is_difference:
            self._format.add_difference(memory, vectors)

    def packed_version(self, memory: Tensor, vectors: FlatBuffers) -> Tensor:
        """Return the vectors themselves."""
        return vectors.memory


class _VersionDifferences(VersionMessages):
    """Differences of versions to what each process has.

    The server keeps a copy of that, so what a message has left out is part of the next difference.

    Args:
        compressed: compressed format.
        versions: versions.
    """

    def __init__(self, compressed: CompressedFormat, versions: VersionStore) -> None:
        self._format = compressed
        self._versions = versions
        self._held: dict[int, tuple[FlatBuffers, Tensor]] = {}  # what a process has, and memory for the next difference

    def packed(self, version: int) -> Tensor:
        """Return a version as it is."""
        return self._versions[version].memory

    def message(self, peer_id: int, version: int) -> tuple[list[tuple[int, Tensor]], bool]:
        """Return a whole version for a process that has none, else the difference to that."""
        if peer_id not in self._held:
            held = self._format.layout.allocate()
            held.copy_(self._versions[version])
            self._held[peer_id] = (held, self._format.allocate(held))
            return [(WHOLE, self.packed(version))], False
        held, memory = self._held[peer_id]
        self._format.compress_difference(self._versions[version], held, memory)
        return [(0, memory)], True

    def held_by(self, peer_id: int, version: int) -> Tensor:
        """Return the vectors of a version as a process has received it."""
        return self._held[peer_id][0].memory if peer_id in self._held else self.packed(version)

    def forget(self, peer_id: int) -> None:
        """Forget what a process has, which is gone."""
        self._held.pop(peer_id, None)
