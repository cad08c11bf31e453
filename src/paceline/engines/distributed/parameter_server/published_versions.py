"""Published versions: the newest one is the server's own storage, and is copied only if a worker still reads it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.engines.distributed.transport.wire_format import WHOLE, AnyFormat, CompressedWire, WireFormat
from paceline.server.flat_buffers import FlatBuffers, FlatLayout
from paceline.server.parameter_server import ParameterServer
from paceline.server.version_store import VersionStore


class PublishedVersions(VersionStore):
    """Versions of a server and their wire memory.

    Under a protocol that waits for all workers no version is ever copied, because no worker reads it when the next one
    is made. Under other protocols the copy is made while the server is idle.

    With a codec each worker is sent the difference to what it has. The server keeps a copy of that, so what a message
    has left out is part of the next difference.

    Args:
        server: server that makes the versions.
        layout: layout of the model.
        wire: wire format.
        on_release: callback for every version that is no longer read.
    """

    def __init__(
        self,
        server: ParameterServer,
        layout: FlatLayout,
        wire: AnyFormat,
        on_release: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(layout.allocate)
        self._on_release = on_release
        self._server = server
        self._wire = wire
        self._layout = layout
        self._packed: dict[int, Tensor] = {}
        self._held: dict[int, tuple[FlatBuffers, Tensor]] = {}  # what a process has, and memory for the next difference
        self._has_rebound = False
        self._copied: FlatBuffers | None = None  # copy of what the server holds, for the next rebind

    def publish(self, version: int) -> FlatBuffers:
        """Return the server's own storage for the new version, and release the version before it."""
        self._has_rebound = self._newest is not None and self._server.state is not self[self._newest]
        if self._copied is not None:  # copy of the previous version, which was not needed
            self._free.append(self._copied)
            self._copied = None
        return self.add(version, self._server.state)

    def release(self, version: int) -> None:
        """Release one reader's hold on a version."""
        super().release(version)
        if self._on_release is not None and version not in self._stored:
            self._on_release(version)

    def reserve(self) -> bool:
        """Move the server to other storage if the newest version is still read or sent; return whether it has moved."""
        is_read = self.is_in_use(self.newest)
        if is_read:
            self.rebind()
        return is_read

    def rebind(self) -> None:
        """Move the server to storage that no worker reads."""
        self._server.rebind_storage(self._copied or self._copy())
        self._copied = None

    def prepare_copy(self) -> None:
        """Copy what the server holds ahead of time, if the previous update had to rebind."""
        if self._has_rebound and self._copied is None:
            self._copied = self._copy()

    def _copy(self) -> FlatBuffers:
        storage = self.free_storage()
        storage.copy_(self._server.state)
        return storage

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
