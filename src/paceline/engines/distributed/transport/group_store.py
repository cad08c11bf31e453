"""Store in which the processes of a group for sums find each other; its keys travel over authenticated connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.gloo import dist
from paceline.engines.distributed.transport.sum_messages import StoreKey


class GroupStore(dist.Store):  # type: ignore[misc]  # torch does not export its type
    """Keys of one group.

    A key that this process sets is sent to a process which relays it to all members. Those of other members are put in
    as they arrive. torch calls the methods from C++ and does not keep the Python object alive: its owner does.

    Args:
        generation: number of the group.
        send: sends a key to the other members; it must not block.
        prefix: beginning of the keys, where several groups have this number; the others are dropped.
    """

    def __init__(self, generation: int, send: Callable[[StoreKey], object], prefix: str = "") -> None:
        super().__init__()
        self._generation = generation
        self._send = send
        self._prefix = prefix
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_aborted = False

    def put(self, arrived: StoreKey) -> None:
        """Add a key that another member has set; keys of other groups are dropped. Thread-safe."""
        if arrived.generation == self._generation and arrived.key.startswith(self._prefix):
            with self._changed:
                self._values[arrived.key.removeprefix(self._prefix)] = arrived.value
                self._changed.notify_all()

    def abort(self) -> None:
        """End all waiting. Thread-safe."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    def await_keys(self, keys: Sequence[str], timeout_s: float | None) -> list[str]:
        """Wait for keys; return those that were not set in time.

        Args:
            keys: keys to wait for.
            timeout_s: longest wait in seconds; None for no limit.

        Raises:
            ConnectionLost: this process has aborted the group.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_aborted or self.check(keys), timeout_s)
            if self._is_aborted:
                raise ConnectionLost("the group was aborted")
            return [key for key in keys if key not in self._values]

    # --- called by torch ----------------------------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:
        """Set a key for all members."""
        ours = StoreKey(self._generation, self._prefix + key, value)
        self.put(ours)
        self._send(ours)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value.

        Raises:
            ConnectionLost: this process has aborted the group.
        """
        self.await_keys([key], None)
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait for keys.

        Raises:
            ConnectionLost: this process has aborted the group.
            RuntimeError: a key was not set in time.
        """
        missing = self.await_keys(keys, timeout.total_seconds())
        if missing:
            raise RuntimeError(f"a process of the group did not connect within {timeout.total_seconds():g} s")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys are set."""
        return all(key in self._values for key in keys)
