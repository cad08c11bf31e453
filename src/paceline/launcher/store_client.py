"""Client of the store of a run, in the launcher of another host than that of rank 0."""

from __future__ import annotations

import threading
from typing import Any, Self

from paceline.clusters.host_heartbeats import HEARTBEAT_S
from paceline.clusters.launch_env import HOST
from paceline.clusters.launch_settings import LaunchSettings

TIMEOUT_S = 3.0
END_TIMEOUT_S = 1.0


class StoreClient:
    """Connections to the store, through which the launcher of the host of rank 0 also hears that this one lives.

    Args:
        settings: ranks, and where they meet.
    """

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self._has_ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="paceline-heartbeats", daemon=True)

    def __enter__(self) -> Self:
        """Begin the heartbeats."""
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        self._has_ended.set()
        self._heart.join(END_TIMEOUT_S)

    def client(self) -> Any:
        """Return a new client, as all ranks may meet in a new store since the last one; None if it is not reached."""
        from paceline.engines.distributed import reach_store  # late, because it is slow

        return reach_store(self._settings.master, self._settings.port, TIMEOUT_S)

    def _beat(self) -> None:
        store = None
        while not self._has_ended.wait(HEARTBEAT_S):
            try:
                store = store or self.client()
                if store is not None:
                    store.add(f"{HOST}/{self._settings.node_rank}", 1)
            except RuntimeError:
                store = None
