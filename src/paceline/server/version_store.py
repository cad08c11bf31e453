"""Published versions, kept as long as somebody computes on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from paceline.server.flat_buffers import FlatBuffers, copy_checked


class VersionStore:
    """Storage of versions by reference count; what nobody holds any more is used again.

    Storage is written only when it is handed out by `publish`, and handed out only when nobody holds it: no
    reader can see a version change.

    Args:
        allocate: makes storage for one more version.
    """

    def __init__(self, allocate: Callable[[], FlatBuffers]) -> None:
        self._allocate = allocate
        self._free: list[FlatBuffers] = []
        self._stored: dict[int, FlatBuffers] = {}
        self._holders: Counter[int] = Counter()
        self._newest: int | None = None

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, version: int) -> FlatBuffers:
        return self._stored[version]

    @property
    def newest(self) -> int:
        """The version published last."""
        assert self._newest is not None
        return self._newest

    def publish(self, version: int) -> FlatBuffers:
        """Return storage to write the new version into; the one before is let go."""
        return self.keep(version, self.free_storage())

    def free_storage(self) -> FlatBuffers:
        """Return storage that nobody uses."""
        return self._free.pop() if self._free else self._allocate()

    def keep(self, version: int, storage: FlatBuffers) -> FlatBuffers:
        """Let a new version be what is, or will be, in this storage; the one before is let go."""
        self._stored[version] = storage
        self.acquire(version)
        if self._newest is not None:
            self.release(self._newest)
        self._newest = version
        return storage

    def acquire(self, version: int) -> FlatBuffers:
        """Keep a version until it is released."""
        self._holders[version] += 1
        return self._stored[version]

    def is_in_use(self, version: int) -> bool:
        """Return whether somebody holds a version, apart from its being the newest."""
        return self._holders[version] > (version == self._newest)

    def release(self, version: int) -> None:
        """Let a version go."""
        self._holders[version] -= 1
        if not self._holders[version]:
            del self._holders[version]
            storage = self._stored.pop(version)
            if all(storage is not other for other in self._stored.values()):
                self._free.append(storage)

    def state_dict(self) -> dict[str, Any]:
        """Return the stored versions and who holds them."""
        stored = {version: vectors.memory.clone() for version, vectors in self._stored.items()}
        return {"stored": stored, "holders": Counter(self._holders), "newest": self._newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store such versions, in the place of those that are there."""
        self._free += self._stored.values()
        self._stored = {}
        for version, memory in state["stored"].items():
            self._stored[version] = self.free_storage()
            copy_checked(self._stored[version].memory, memory)
        self._holders = Counter(state["holders"])
        self._newest = state["newest"]
