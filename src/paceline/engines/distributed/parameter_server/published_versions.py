"""Versions that are sent: the newest lies where the server keeps its parameters, and is copied only if it must be."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.engines.distributed.transport.wire_format import WireFormat
from paceline.server.flat_buffers import FlatBuffers, FlatLayout
from paceline.server.parameter_server import ParameterServer
from paceline.server.version_store import VersionStore


class PublishedVersions(VersionStore):
    """Versions of a server, and what travels of them.

    Under a protocol that waits for everybody no version is ever copied: all have left it when the next is made. Under
    others a copy is made before there is an update to wait for it.

    Args:
        server: makes the versions.
        layout: of the model.
        wire: in which numbers they travel.
        forgotten: is told of every version that nobody holds any more.
    """

    def __init__(
        self,
        server: ParameterServer,
        layout: FlatLayout,
        wire: WireFormat,
        forgotten: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(layout.allocate)
        self._forgotten = forgotten
        self._server = server
        self._wire = wire
        self._packed: dict[int, Tensor] = {}
        self._moves = False
        self._ahead: FlatBuffers | None = None  # what the server holds, where it may go on

    def take_over(self, version: int) -> None:
        """Publish what the server holds, where it lies."""
        self._moves = self._newest is not None and self._server.state is not self[self._newest]
        if self._ahead is not None:  # of the version before, which nobody read any more
            self._free.append(self._ahead)
            self._ahead = None
        self.add(version, self._server.state)

    def release(self, version: int) -> None:
        """Let a version go."""
        super().release(version)
        if self._forgotten is not None and version not in self._stored:
            self._forgotten(version)

    def reserve(self) -> bool:
        """Let the server go on elsewhere if somebody has still to read the newest version, or is being sent it."""
        is_read = self.is_in_use(self.newest)
        if is_read:
            self.rebind()
        return is_read

    def rebind(self) -> None:
        """Let the server go on in a place that nobody reads."""
        self._server.rebind_storage(self._ahead or self._copied())
        self._ahead = None

    def get_ready(self) -> None:
        """Copy what the server holds, if it had to go elsewhere for the last update, and so may have to once more."""
        if self._moves and self._ahead is None:
            self._ahead = self._copied()

    def _copied(self) -> FlatBuffers:
        place = self.free_storage()
        place.copy_(self._server.state)
        return place

    def travelling(self, version: int) -> Tensor:
        """Return what is sent of a version that somebody holds; it is packed once."""
        if not self._wire.is_rounding:
            return self[version].memory
        if version not in self._packed:
            past = [each for each in self._packed if each not in self._stored]
            room = self._packed.pop(past[0]) if past else self._wire.room(self[version])
            self._wire.pack(self[version], room)
            self._packed[version] = room
        return self._packed[version]
