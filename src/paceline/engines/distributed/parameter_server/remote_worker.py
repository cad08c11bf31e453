"""State of a remote worker at rank 0."""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import nan
from typing import NamedTuple

from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer, PeerMessage
from paceline.engines.distributed.transport.task_messages import RemoteTaskDone
from paceline.engines.worker_pool import PoolWorker
from paceline.worker.replica import GradientStats

NO_VERSION = -1


def processes_of(workers: Iterable[RemoteWorker]) -> set[str]:
    """Return the processes of the workers that are ready, each as in `Hello`."""
    return {worker.process for worker in workers if worker.is_ready}


class ArrivingGradient(NamedTuple):
    """Gradient of which at least the part of rank 0 has arrived.

    Attributes:
        done: scalars from the worker.
        at_s: moment at which the worker completed it, on this host's monotonic clock.
        contents_s: seconds until the part of rank 0 had arrived.
    """

    done: RemoteTaskDone
    at_s: float
    contents_s: float


class RemoteWorker(PoolWorker):
    """Worker, or evaluator, in another process.

    A gradient has arrived when its last part has arrived at its server. Rank 0 also receives the scalars, and the
    shard servers report the other parts to it. So a gradient of which a part is missing, because its worker has
    ended, has not arrived.

    Args:
        peer: process of the worker.
        shards: numbers of the shard servers, which have to admit the worker before it is given a task.

    Attributes:
        peer_id: id of the process.
        worker: number of the worker.
        connection: connection to the process.
        process: text that no other process has, as in `Hello`.
        not_admitted_by: shard servers that have not admitted the worker yet.
        newest_sent: newest version that was sent to the worker.
        sent_s: when the worker was sent its task, on the monotonic clock.
        evaluating: versions that it evaluates, as the evaluator.
        last: what became of its newest gradient, and its staleness, as in `TaskProgress`.
        unneeded: newest draw whose gradient the worker knows to be unneeded; 0 for none.
        newest_push_s: seconds that its newest gradient took to arrive; nan before the first.
    """

    def __init__(self, peer: AcceptedPeer, shards: Iterable[int]) -> None:
        super().__init__()
        self.peer_id = peer.peer_id
        self.worker = peer.worker
        self.connection = peer.connection
        self.process = peer.process
        self.not_admitted_by = set(shards)
        self.newest_sent = NO_VERSION
        self.sent_s = 0.0
        self.evaluating: set[int] = set()
        self.last = ("", 0)
        self.unneeded = 0
        self.newest_push_s = nan
        self._received = dict.fromkeys(self.not_admitted_by, 0)  # draw of the newest part, by shard
        self._arriving: ArrivingGradient | None = None

    def on_sent(self, version: int) -> None:
        """Record that the worker was sent a task at this version."""
        self.newest_sent = version
        self.sent_s, self.last = time.monotonic(), ("", 0)

    def has(self, draw: int) -> bool:
        """Return whether the worker computes this task."""
        return self.working is not None and self.working.draw == draw

    def on_task_done(self, done: RemoteTaskDone, event: PeerMessage) -> ArrivingGradient | None:
        """Record the scalars and the part of rank 0; return the gradient if it is complete."""
        self._arriving = ArrivingGradient(done, event.at_s, event.contents_s)
        return self._complete()

    def on_delivered(self, stats: GradientStats) -> None:
        """Record why a gradient that was computed is not used, if it is not."""
        if self.last[0] != "interrupted":
            self.last = ("skipped" if stats.skipped else "late" if stats.finite else "not finite", 0)

    def on_part_received(self, shard: int, draw: int) -> ArrivingGradient | None:
        """Record the part of a shard; return the gradient if it is complete."""
        self._received[shard] = draw
        return self._complete()

    def _complete(self) -> ArrivingGradient | None:
        arriving = self._arriving
        if arriving is None or any(draw < arriving.done.draw for draw in self._received.values()):
            return None
        self._arriving = None
        return arriving
