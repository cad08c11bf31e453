"""Processes around a server: those of its host that it starts, and the acceptor by which all others come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from paceline.engines.distributed.coordinator_tensors import PeerReceiver
from paceline.engines.distributed.parameter_server.sidecar_restarts import SidecarRestarts
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.rendezvous.acceptor import GRACE_S, Acceptor
from paceline.engines.distributed.rendezvous.rendezvous import listen_as_rank_0, publish_successor
from paceline.engines.distributed.rendezvous.sidecar import Sidecar
from paceline.engines.distributed.transport.messages import End

BESIDE = 0  # number of the worker beside rank 0


class ServerProcesses:
    """Acceptor of a server, and its sidecars: a worker beside rank 0, and the evaluator.

    Args:
        rank: settings of this process.
        job_spec: settings that must be equal on all processes.
        processes: number of processes that may come.
        receiver: receiver of what comes from other processes.
        on_due: called in another thread when the worker beside rank 0, which was lost, is to be started again.
    """

    def __init__(
        self,
        rank: Rank,
        job_spec: dict[str, Any],
        *,
        processes: int,
        receiver: PeerReceiver,
        on_due: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._cluster = rank.cluster
        self._needs_evaluator = rank.job.eval_data is not None
        self._job_spec = job_spec
        self._processes = processes
        self._receiver = receiver
        self._on_due = on_due
        self._acceptor: Acceptor | None = None
        self._beside: SidecarRestarts | None = None
        self._evaluator: Sidecar | None = None

    def start(self) -> None:
        """Listen where every rank finds rank 0, and start the processes of this host."""
        self._acceptor = listen_as_rank_0(
            self._cluster,
            self._rank.transport,
            self._job_spec,
            processes=self._processes,
            handler=self._receiver,
            on_accept=self._receiver.on_accept,
        )
        start = self._rank.host.start_sidecar
        if self._cluster.has_worker_at_server:
            self._beside = SidecarRestarts(partial(start, BESIDE), self._cluster.ranks.max_restarts, self._on_due)
        if self._needs_evaluator:
            self._evaluator = start(self._cluster.n)

    def listen(self, host: str, port: int) -> int:
        """Listen on an address of this host without admitting workers; return the port, a free one for 0."""
        self._acceptor = Acceptor(
            transport=self._rank.transport,
            host=host,
            port=port,
            job_spec=self._job_spec,
            processes=self._processes,
            handler=self._receiver,
            on_accept=self._receiver.on_accept,
        )
        self._acceptor.is_open = False
        return self._acceptor.address[1]

    def succeed(self) -> None:
        """Admit workers where this process listens, and start an evaluator."""
        assert self._acceptor is not None
        self._acceptor.is_open = True
        publish_successor(self._cluster, self._acceptor.address)
        if self._needs_evaluator:
            self._evaluator = self._rank.host.start_sidecar(self._cluster.n, self._acceptor.address)

    def check(self) -> None:
        """Check that the processes of this host live.

        Raises:
            RunError: one has ended.
        """
        for sidecar in self._sidecars:
            sidecar.check()

    @property
    def _sidecars(self) -> list[SidecarRestarts | Sidecar]:
        return [each for each in (self._beside, self._evaluator) if each is not None]

    def on_lost(self, worker: int) -> None:
        """Begin the pause before a worker is started again, if it is the one beside rank 0."""
        if self._beside is not None and worker == BESIDE:
            self._beside.on_lost(worker)

    def on_joined(self, worker: int) -> None:
        """End the pause if the worker beside rank 0 has come back by itself, as one whose connection was lost."""
        if self._beside is not None and worker == BESIDE:
            self._beside.end_pause()

    def start_again(self) -> None:
        """Start the worker beside rank 0 again."""
        assert self._beside is not None
        self._beside.start_again()

    def disconnect(self, peer_id: int) -> None:
        """Disconnect a process, which waits for that if it leaves on purpose."""
        assert self._acceptor is not None
        self._acceptor.disconnect(peer_id, GRACE_S)

    def announce(self, end: End) -> None:
        """Let processes that come now know the end of the run."""
        assert self._acceptor is not None
        self._acceptor.announce_end(end)

    def join(self, peer_ids: Iterable[int], timeout_s: float) -> None:
        """Wait until processes have gone."""
        assert self._acceptor is not None
        self._acceptor.join([*peer_ids], timeout_s)

    def stop_listening(self) -> None:
        """Close what `listen` has opened, if the run has not."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None

    def close(self, send_end: Callable[[], None], on_closed: Callable[[], None]) -> None:
        """End all processes.

        Args:
            send_end: function that tells the connected processes the end of the run.
            on_closed: function that is called when all connections are closed.
        """
        if self._evaluator is not None:
            self._evaluator.kill()  # its result is no longer needed
        if self._beside is not None:
            self._beside.end_pause()
        if self._acceptor is not None:
            send_end()
        if self._acceptor is None or self._acceptor.close():  # else a callback may still use what is closed here
            self._rank.close()
            on_closed()
        for sidecar in self._sidecars:
            sidecar.stop()
        self._acceptor = None
