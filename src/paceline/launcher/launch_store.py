"""Store in which the ranks meet (MASTER_PORT): it is in the launcher, so that it outlives every rank."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from paceline.clusters.launch_env import BEGUN
from paceline.clusters.launch_settings import LaunchSettings
from paceline.errors import UsageError
from paceline.launcher.run_facts import RunFacts


class LaunchStore:
    """Store of torch on the host of rank 0. It begins with its first client, because the import of torch is slow.

    Args:
        settings: ranks, and where they meet.

    Attributes:
        begun: digests of the runs that have begun in earlier attempts, a line each.

    Raises:
        UsageError: the ranks cannot meet there.
    """

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="paceline-store")
        self._store: Future[Any] | None = None
        self.begun = ""
        self.listener = self._listen()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the store."""
        self._end()
        self._executor.shutdown()

    @property
    def port(self) -> int:
        """Port of the store."""
        port: int = self.listener.getsockname()[1]
        return port

    @property
    def is_there(self) -> bool:
        """Whether it serves, so that a client need not be waited for."""
        return self._store is not None and self._store.done()

    def client(self) -> Any:
        """Return the store; None before it begins."""
        return self._store.result() if self._store is not None else None

    def begin(self) -> None:
        """Begin to serve, when a client connects to `listener`."""
        self._store = self._executor.submit(_serve, self.listener.dup())  # signals would wait for the import of torch

    def renew(self) -> None:
        """Begin anew with an empty store: what the ranks of one attempt have written is wrong in the next one."""
        begun = RunFacts(self.client(), self._settings.world_size).text(BEGUN)
        self.begun = "\n".join(filter(None, [self.begun, begun]))
        self._end()  # the last reference: another one would keep the port
        self.listener = self._listen()

    def _end(self) -> None:
        if self._store is not None:
            self._store.result()
        self._store = None  # which closes it
        self.listener.close()

    def _listen(self) -> socket.socket:
        host, port = self._settings.master, self._settings.port
        try:
            if self._settings.nnodes == 1:
                return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server(("", port))
        except OSError as error:
            raise UsageError(
                f"the ranks cannot meet at {host}:{port} ({error.strerror}): give --rdzv-endpoint with the address of "
                "this host and a port that no program uses"
            ) from None


def _serve(listener: socket.socket) -> Any:
    from paceline.engines.distributed import serve_store

    return serve_store(listener)
