"""Versions that are sent: the newest lies where the server keeps its parameters, and is copied only if it must be."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.engines.distributed.wire import Wire
from paceline.engines.versions import Versions
from paceline.server import ParameterServer
from paceline.vectors import Layout


class Published(Versions):
    """Versions of a server, and what travels of them.

    Under a protocol that waits for everybody no version is ever copied: all have left it when the next is made.

    Args:
        server: makes the versions.
        layout: of the model.
        wire: in which numbers they travel.
        forgotten: is told of every version that nobody holds any more.
    """

    def __init__(
        self, server: ParameterServer, layout: Layout, wire: Wire, forgotten: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(layout.allocate)
        self._forgotten = forgotten
        self._server = server
        self._wire = wire
        self._packed: dict[int, Tensor] = {}

    def take_over(self, version: int) -> None:
        """Publish what the server holds, where it lies."""
        self.keep(version, self._server.state)

    def release(self, version: int) -> None:
        """Let a version go."""
        super().release(version)
        if self._forgotten is not None and version not in self._stored:
            self._forgotten(version)

    def make_way(self) -> bool:
        """Let the server go on elsewhere if somebody has still to read the newest version, or is being sent it."""
        is_read = self.is_read(self.newest)
        if is_read:
            self.go_elsewhere()
        return is_read

    def go_elsewhere(self) -> None:
        """Let the server go on in a place that nobody reads."""
        self._server.move_to(self.spare())

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
