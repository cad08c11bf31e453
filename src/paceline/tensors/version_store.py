"""Reference-counted store of published parameter versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from paceline.tensors.flat_buffers import FlatBuffers, copy_checked


class VersionStore:
    """Versions by reference count; storage without references is reused.

    Storage is written only after `publish` has returned it, and `publish` returns only storage without readers: no
    reader can see a version change. A version that has no reader is updated in place, as under a protocol that waits
    for all workers.

    Args:
        allocate: function that returns storage for one more version.
        on_release: callback with each version that has no references any more; None for none.
    """

    def __init__(self, allocate: Callable[[], FlatBuffers], on_release: Callable[[int], None] | None = None) -> None:
        self._allocate = allocate
        self._on_release = on_release
        self._free: list[FlatBuffers] = []
        self._stored: dict[int, FlatBuffers] = {}
        self._references: Counter[int] = Counter()
        self._newest: int | None = None

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, version: int) -> bool:
        return version in self._stored

    def __getitem__(self, version: int) -> FlatBuffers:
        return self._stored[version]

    @property
    def newest(self) -> int:
        """Version that was published last."""
        assert self._newest is not None
        return self._newest

    def publish(self, version: int) -> FlatBuffers:
        """Return storage for the new version, and release the version before it."""
        is_in_place = self._newest is not None and not self.is_newest_read
        return self.add(version, self[self.newest] if is_in_place else self.free_storage())

    def free_storage(self) -> FlatBuffers:
        """Return storage without references."""
        return self._free.pop() if self._free else self._allocate()

    def add(self, version: int, storage: FlatBuffers) -> FlatBuffers:
        """Register a storage as that of the newest version, and release the version before it."""
        self._stored[version] = storage
        self.acquire(version)
        if self._newest is not None:
            self.release(self._newest)
        self._newest = version
        return storage

    def acquire(self, version: int) -> FlatBuffers:
        """Add a reference to a version, and return its storage."""
        self._references[version] += 1
        return self._stored[version]

    @property
    def is_newest_read(self) -> bool:
        """Whether the newest version has references besides that of being the newest."""
        return self._references[self.newest] > 1

    def release(self, version: int) -> None:
        """Remove one reference; storage without references becomes free."""
        self._references[version] -= 1
        if not self._references[version]:
            del self._references[version]
            storage = self._stored.pop(version)
            if all(storage is not other for other in self._stored.values()):  # else a version was made in place
                self._free.append(storage)
            if self._on_release is not None:
                self._on_release(version)

    def state_dict(self) -> dict[str, Any]:
        """Return the stored versions and their reference counts."""
        stored = {version: vectors.memory.clone() for version, vectors in self._stored.items()}
        return {"stored": stored, "holders": Counter(self._references), "newest": self._newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all stored versions by those of such a state, in new storage: a server may have the present one."""
        self._stored = {}
        for version, memory in state["stored"].items():
            self._stored[version] = self._allocate()
            copy_checked(self._stored[version].memory, memory)
        self._references = Counter(state["holders"])
        self._newest = state["newest"]
