"""Published versions of a server, as messages to workers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.engines.distributed.transport.wire_format import WHOLE, AnyFormat, CompressedWire, WireFormat
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.tensors.version_store import VersionStore


class PublishedVersions(VersionStore):
    """Versions of a server and their wire memory.

    With a codec each worker is sent the difference to what it has. The server keeps a copy of that, so what a message
    has left out is part of the next difference.

    Args:
        layout: layout of the model.
        wire: wire format.
        on_release: callback for every version that is no longer read.
    """

    def __init__(
        self,
        layout: FlatLayout,
        wire: AnyFormat,
        on_release: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(layout.allocate)
        self._on_release = on_release
        self._wire = wire
        self._layout = layout
        self._packed: dict[int, Tensor] = {}
        self._held: dict[int, tuple[FlatBuffers, Tensor]] = {}  # what a process has, and memory for the next difference

    def release(self, version: int) -> None:
        """Release one reader's hold on a version."""
        super().release(version)
        if self._on_release is not None and version not in self._stored:
            self._on_release(version)

    def packed(self, version: int) -> Tensor:
        """Return the wire memory of a version that is in use; each version is packed once."""
        if isinstance(self._wire, CompressedWire) or not self._wire.is_rounding:
            return self[version].memory
        if version not in self._packed:
            past = [each for each in self._packed if each not in self._stored]
            memory = self._packed.pop(past[0]) if past else self._wire.allocate(self[version])
            self._wire.pack(self[version], memory)
            self._packed[version] = memory
        return self._packed[version]

    def message(self, peer_id: int, version: int, is_new: bool) -> tuple[list[tuple[int, Tensor]], bool]:
        """Return the numbered buckets that bring a process to a version, and whether they are a difference.

        The version is in use until the process has received them. There are none if it is not new to the process.
        """
        if not is_new:
            return [], False
        if isinstance(self._wire, WireFormat):
            return [(0, self.packed(version))], False
        if peer_id not in self._held:
            held = self._layout.allocate()
            held.copy_(self[version])
            self._held[peer_id] = (held, self._wire.allocate(held))
            return [(WHOLE, self[version].memory)], False
        held, memory = self._held[peer_id]
        self._wire.compress_difference(self[version], held, memory)
        return [(0, memory)], True

    def held_by(self, peer_id: int, version: int) -> Tensor:
        """Return the wire memory of a version as a process has received it."""
        return self._held[peer_id][0].memory if peer_id in self._held else self.packed(version)

    def forget(self, peer_id: int) -> None:
        """Forget what a process has, which is gone."""
        self._held.pop(peer_id, None)
