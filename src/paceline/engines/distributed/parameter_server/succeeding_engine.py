"""Engine of a standby that has become the server."""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Collection
from typing import Any

from paceline.clusters.devices import cores
from paceline.core.events import Evaluate
from paceline.engines.distributed.parameter_server.engine import ParameterServerEngine
from paceline.engines.distributed.parameter_server.remote_worker import RemoteWorker, processes_of
from paceline.engines.distributed.parameter_server.shard_clients import ShardClients
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.acceptor import Acceptor
from paceline.engines.distributed.rendezvous.first_workers import await_peers, not_joined
from paceline.engines.distributed.rendezvous.rendezvous import publish_successor
from paceline.errors import RunError
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout


class SucceedingEngine(ParameterServerEngine):
    """Parameter server engine that listens from the beginning, and admits workers once it runs.

    It begins with more than half of the processes that rank 0 had, so that no two servers train with them at the same
    time. Another process with the number of one of them does not count. The others join later. An evaluation waits
    until its own evaluator has started.

    Args:
        rank: settings of this process.
        server: server of the parameters.
        layout: layout of the model.

    Attributes:
        known_processes: processes of the workers that took part at the last update that both have, as in `Hello`.
    """

    known_processes: Collection[str] = ()

    def __init__(self, rank: Rank, server: ParameterServer, layout: FlatLayout) -> None:
        super().__init__(rank, server, layout, ShardClients([0]))
        self._waiting: Evaluate | None = None

    def listen(self, host: str, port: int, job_spec: dict[str, Any]) -> int:
        """Listen on an address of this host without admitting workers; return the port, a free one for 0."""
        self._acceptor = Acceptor(
            transport=self._rank.transport,
            host=host,
            port=port,
            job_spec=job_spec,
            buffers=self._buffers(),
            handler=self._handler,
        )
        self._acceptor.is_open = False
        return self._acceptor.address[1]

    def stop_listening(self) -> None:
        """Close what `listen` has opened, if the run has not."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None

    def _start_workers(self) -> None:
        assert self._acceptor is not None
        self._rank.process.set_num_threads(max(1, cores() // self._cluster.ranks.local_world_size))
        self._acceptor.is_open = True
        publish_successor(self._cluster, self._acceptor.address)
        if self._needs_evaluator:
            self._sidecars.append(self._rank.process.start_sidecar(self._cluster.n, self._acceptor.address))
        self._selector.register(self._peer_events, selectors.EVENT_READ)
        try:
            await_peers(self._lacking, self._read_for_a_moment, self._cluster.start_timeout_s)
        except RunError as error:
            advice = "rank 0 may go on without this process, so it ends; its state is in the folder of rank 0"
            raise RunError(f"{error}; {advice}") from error
        self._events = deque(not_joined(self._cluster, self._ready(), self.now))

    def _lacking(self) -> str:
        if self.signals.caught:
            return ""
        needed = (
            len(self.known_processes) // 2
            + 1
            - len(processes_of(self._workers.values()).intersection(self.known_processes))
        )
        return f"{needed} more workers of rank 0" if needed > 0 else ""

    def evaluate(self, command: Evaluate) -> None:
        """Evaluate a version, once there is an evaluator."""
        if self._evaluator is None:
            self._waiting = command
            self._versions.acquire(command.version)
        else:
            super().evaluate(command)

    def _admit(self, worker: RemoteWorker) -> None:
        super()._admit(worker)
        waiting = self._waiting
        if self._evaluator is not None and waiting is not None:
            self._waiting = None
            super().evaluate(waiting)
            self._versions.release(waiting.version)
