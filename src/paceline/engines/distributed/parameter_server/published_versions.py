"""Published versions of a server, as messages to workers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.engines.distributed.transport.wire import Wire
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.tensors.version_store import VersionStore


class PublishedVersions(VersionStore):
    """Versions of a server and their wire memory.

    Args:
        layout: layout of the model.
        wire: wire.
        on_release: callback for every version that is no longer read.
        allocate: function that returns storage for one more version; None for memory of this process.
    """

    def __init__(
        self,
        layout: FlatLayout,
        wire: Wire,
        on_release: Callable[[int], None] | None = None,
        allocate: Callable[[], FlatBuffers] | None = None,
    ) -> None:
        super().__init__(allocate or layout.allocate, on_release)
        self._messages = wire.messages_of(self)

    def packed(self, version: int) -> Tensor:
        """Return the wire memory of a version that is in use; each version is packed once."""
        return self._messages.packed(version)

    def message(self, peer_id: int, version: int, is_new: bool) -> tuple[list[tuple[int, Tensor]], bool]:
        """Return the numbered buckets that bring a process to a version, and whether they are a difference.

        The version is in use until the process has received them. There are none if it is not new to the process.
        """
        return self._messages.message(peer_id, version) if is_new else ([], False)

    def held_by(self, peer_id: int, version: int) -> Tensor:
        """Return the wire memory of a version as a process has received it."""
        return self._messages.held_by(peer_id, version)

    def forget(self, peer_id: int) -> None:
        """Forget what a process has, which is gone."""
        self._messages.forget(peer_id)
