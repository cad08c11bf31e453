"""The first process of a worker that is several: it gathers the others, and passes on to them what rank 0 wants."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import Minibatch
from paceline.engines.distributed.node_worker.node_group import NodeGroup
from paceline.engines.distributed.rendezvous.acceptor import (
    GRACE_S,
    Acceptor,
    News,
    PeerJoined,
    PeerLost,
    PeerMessage,
    PeerRejected,
)
from paceline.engines.distributed.rendezvous.rendezvous import Endpoint, Rendezvous
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.messages import EndNotice, RemoteTask
from paceline.errors import RunError, UsageError
from paceline.jobs.job import Job
from paceline.server.flat_buffers import FlatBuffers
from paceline.utils.rank_logger import RankLogger
from paceline.worker.parameter_guard import checksum
from paceline.worker.replica import GradientStats, Replica

LOG = RankLogger(__name__)

LOOPBACK = "127.0.0.1"


class NodeLeader:
    """Speaks with the other processes of this worker, over a line to each; of one that is alone, with nobody.

    Args:
        cluster: of this process.
        is_unwanted: whether the work at hand is to be abandoned.
        on_leave: is told, from another thread, that one of the others was told to end, and why.
        on_end: likewise, that one has failed or is gone; `last_word` says more.
    """

    def __init__(
        self,
        cluster: Torchrun,
        is_unwanted: Callable[[], bool],
        on_leave: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._on_leave = on_leave
        self._on_end = on_end
        self._last_word: dict[str, Any] = {"leaves": "a process of its host is gone"}
        self._is_known = threading.Event()
        self._lines: dict[int, Connection] = {}  # by ticket
        self._news: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self._door: Acceptor | None = None
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._is_over = False
        self._is_passed_on = False
        uses_nccl = cluster.has_gpu_each(torch.cuda.device_count())
        self.team = NodeGroup(cluster.place, cluster.team_size, is_unwanted, uses_nccl=uses_nccl)

    def gather(self, rank_0: Endpoint, agreement: dict[str, Any]) -> None:
        """Wait for the others, who hear of this one at the store of rank 0.

        Raises:
            UsageError: one of them is to do something else.
            RunError: they do not all come.
        """
        if self.team.size == 1:
            return
        meeting = Rendezvous.on(LOOPBACK, silence_s=self._cluster.silence_s)
        self._door = Acceptor(meeting, self._cluster.ranks.token, agreement, [None] * self.team.size, self._news)
        rank_0.client().set(team_key(self._cluster.worker), str(meeting.place.address[1]))
        self._await_everybody()
        self._watcher.start()
        key = secrets.token_hex(32)  # whoever finds the store, but does not know the token, cannot take a place
        for line in self._lines.values():
            line.tell({"team": key})
        self.team.connect(meeting.place.client(), key, meeting.place.device)

    def _await_everybody(self) -> None:
        deadline_s = time.monotonic() + self._cluster.start_timeout_s
        places: dict[int, int] = {}  # by ticket
        while missing := set(range(1, self.team.size)) - set(places.values()):
            try:
                news = self._news.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise RunError(
                    f"{_named(missing)} of worker {self._cluster.worker} did not come within start_timeout_s = "
                    f"{self._cluster.start_timeout_s:g} s: see what it says"
                ) from None
            match news:
                case PeerJoined(ticket, place, line):
                    places[ticket] = place
                    self._lines[ticket] = line
                case PeerLost(ticket):
                    places.pop(ticket, None)
                    self._lines.pop(ticket, None)
                case PeerRejected(reason):
                    raise UsageError(reason)

    def _watch(self) -> None:
        """Hear the others while the main thread computes."""
        while (news := self._news.get()) is not None:
            match news:
                case PeerMessage(ticket, {"leaves": reason}) if ticket in self._lines:
                    self._on_leave(str(reason))
                case PeerMessage(ticket, dict() as text) if ticket in self._lines:
                    self._tear(text)
                case PeerLost(ticket, reason) if ticket in self._lines:
                    self._tear({"leaves": f"a process of its host is gone: {reason}"})
                case PeerRejected(reason):
                    LOG.warning("rejected a process: %s", reason)

    def _tear(self, text: dict[str, Any]) -> None:
        if not self._is_over:
            self._is_over = True
            self._last_word = text
            self._is_known.set()
            self._on_end()
            self.team.abort()

    def last_word(self) -> dict[str, Any]:
        """Return what rank 0 is to be told when the team is torn, which may take a moment to be known."""
        self._is_known.wait(1.0)
        return self._last_word

    # --- while it computes --------------------------------------------------------------------------------

    def expect(self, work: RemoteTask) -> None:
        """Note whether the version has changed since it was handed round."""
        self._is_passed_on &= not work.sends_version

    def pass_on(self, draw: int, minibatch: Minibatch | None, version: FlatBuffers) -> None:
        """Let the others compute their shares of a minibatch at a version."""
        work = RemoteTask(draw, 0, not self._is_passed_on, 0.0, *(minibatch or (None, None, None)))
        if self._cluster.debug:
            work = work._replace(checksum=checksum(version.memory))
        for line in self._lines.values():
            line.settle()  # they have agreed on what became of the work before
            line.send(work, will_be_answered=True)
        if self._lines and not self._is_passed_on:
            self.team.hand_round(version)
        self._is_passed_on = True

    # --- at the end ---------------------------------------------------------------------------------------

    def dismiss(self, text: dict[str, Any]) -> None:
        """Let the others leave, with the text that says why."""
        self._is_over = True
        for line in self._lines.values():
            line.tell(text)
        self._wait()

    def end(self, last: FlatBuffers, end: dict[str, Any]) -> None:
        """Give the others the parameters, tell them why the run ended, and wait until they have gone."""
        self._is_over = True
        for line in self._lines.values():
            line.send(EndNotice(0), [last.memory])
            line.tell({"end": end})
        self._wait()

    def close(self) -> None:
        """End every line, and let go of the team."""
        self._is_over = True
        self.team.close()
        if self._door is not None:
            self._door.close()
        self._news.put(None)
        if self._watcher.is_alive():
            self._watcher.join()

    def _wait(self) -> None:
        if self._door is not None:
            self._door.wait(list(self._lines), GRACE_S)


class LeadingReplica(Replica):
    """Passes on each minibatch before it computes its own share.

    Args:
        job: and what follows as in `Replica`.
        leader: of the processes that share.
        settings: of a `Replica`.
    """

    def __init__(self, job: Job, seed: int, n: int, *, leader: NodeLeader, **settings: Any) -> None:
        super().__init__(job, seed, n, group=leader.team, **settings)
        self._leader = leader

    def gradient(
        self, worker: int, draw: int, minibatch: Minibatch | None, version: FlatBuffers, gradient: FlatBuffers
    ) -> GradientStats:
        """Compute the gradient of a minibatch at a version, with the others."""
        self._leader.pass_on(draw, minibatch, version)
        return super().gradient(worker, draw, minibatch, version, gradient)


def team_key(worker: int) -> str:
    """Return the key of the store of rank 0 under which a worker's other processes find the first one."""
    return f"paceline/team/{worker}"


def _named(places: set[int]) -> str:
    return f"process{'es' if len(places) > 1 else ''} {', '.join(map(str, sorted(places)))}"
