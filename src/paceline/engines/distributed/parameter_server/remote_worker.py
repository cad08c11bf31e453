"""State of a remote worker at rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from math import isnan, nan
from typing import NamedTuple

from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer, PeerMessage
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.task_messages import (
    EvaluationResult,
    GradientUnneeded,
    RemoteTaskCancelled,
    RemoteTaskDone,
)
from paceline.engines.task_board import WorkerTasks
from paceline.worker.task_progress import DROPPED

NO_VERSION = -1


def processes_of(workers: Iterable[RemoteWorker]) -> set[str]:
    """Return the processes of the workers that are ready, each as in `Hello`."""
    return {worker.process for worker in workers if worker.tasks.is_ready}


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


class RemoteWorker:
    """Worker, or evaluator, in another process.

    A gradient has arrived when its last part has arrived at its server. Rank 0 also receives the scalars, and the
    shard servers report the other parts to it. So a gradient of which a part is missing, because its worker has
    ended, has not arrived.

    Args:
        peer: process of the worker.
        shards: numbers of the shard servers, which have to admit the worker before it is given a task.
        tasks: tasks of the worker.

    Attributes:
        tasks: as given.
        peer_id: id of the process.
        peer_ids: ids of all processes of the worker.
        worker: number of the worker.
        connection: connection to the process.
        process: text that no other process has, as in `Hello`.
        gpu: identifier of the GPU on which it computes, as in `Hello`.
        version: newest version that it had when it joined, as in `Hello`.
        not_admitted_by: shard servers that have not admitted the worker yet.
        newest_sent: newest version that was sent to the worker.
        sent_s: when the worker was sent its task, on the monotonic clock.
        evaluating: versions that it evaluates, as the evaluator.
        last: what became of its newest gradient, and its staleness, as in `TaskProgress`.
        unneeded: newest draw whose gradient the worker knows to be unneeded; 0 for none.
        is_paused: whether its loop pauses.
        is_leaving: whether it has said that it leaves.
    """

    def __init__(self, peer: AcceptedPeer, shards: Iterable[int], tasks: WorkerTasks) -> None:
        self.tasks = tasks
        self.peer_id = peer.peer_id
        self.peer_ids = (peer.peer_id, *peer.others)
        self.worker = peer.worker
        self.connection = peer.connection
        self.process = peer.process
        self.gpu = peer.gpu
        self.version = peer.version
        self.not_admitted_by = set(shards)
        self.newest_sent = NO_VERSION
        self.sent_s = 0.0
        self.evaluating: set[int] = set()
        self.last = ("", 0)
        self.unneeded = 0
        self.is_paused = False
        self.is_leaving = False
        self._newest_push_s = nan  # of its newest gradient
        self._received = dict.fromkeys(self.not_admitted_by, 0)  # draw of the newest part, by shard
        self._arriving: ArrivingGradient | None = None

    def on_sent(self, version: int) -> None:
        """Record that the worker was sent a task at this version."""
        self.newest_sent = version
        self.sent_s = time.monotonic()
        self.last = ("", 0)

    def on_skipped_update(self) -> None:
        """Note that what it has computed for an update is dropped with the update; a worker knows what it skipped."""
        if self.last[0] not in ("skipped", "not finite"):
            self.last = (DROPPED, 0)

    def computes_at(self, version: int) -> bool:
        """Return whether the worker computes a gradient at this version."""
        return self.tasks.working is not None and self.tasks.working.version == version

    def tell_if_unneeded(self, would_accept: Callable[[int, int], bool]) -> None:
        """Tell the worker if the gradient of its task cannot be used any more; of one that it cancels it knows that."""
        task = self.tasks.working
        if task is not None and task.draw > self.unneeded and not would_accept(self.worker, task.draw):
            self.unneeded = task.draw
            self.connection.send(GradientUnneeded(task.draw))

    def why_refused(self, message: Message) -> str:
        """Return what is wrong with an answer to a task, empty if nothing is, and for any other message."""
        match message:
            case RemoteTaskDone(draw=draw) | RemoteTaskCancelled(draw=draw) if (
                self.tasks.working is None or self.tasks.working.draw != draw
            ):
                return f"it answered task {draw}, which it did not have"
            case RemoteTaskDone(draw=draw, is_notice=True) if draw > self.unneeded:
                return f"it did not send the gradient of task {draw}, which is needed"
        return ""

    def metrics_of(self, result: EvaluationResult) -> dict[str, float]:
        """Return the metrics of a version that this process evaluates.

        Raises:
            ValueError: it does not evaluate this version, or sends no metrics.
        """
        metrics = result.decoded(self.evaluating)
        self.evaluating.remove(result.version)
        return metrics

    def on_delivered(self, arriving: ArrivingGradient) -> dict[str, float]:
        """Record why a gradient is not used, if it is not, and return its seconds as fields of `Arrival`."""
        done, at_s, push_s = arriving
        if self.last[0] not in ("interrupted", DROPPED):
            measured = done.measured
            self.last = ("skipped" if measured.skipped else "late" if measured.finite else "not finite", 0)
        pull_s = max(0.0, at_s - self.sent_s - done.busy_s)
        if self._received:
            push_s = max(push_s, time.monotonic() - at_s)  # the part of another shard may have come last
        if done.is_notice:
            unsent_s = pull_s if isnan(self._newest_push_s) else self._newest_push_s
            return {"pull_s": pull_s, "push_s": push_s, "unsent_s": unsent_s}
        self._newest_push_s = push_s
        return {"pull_s": pull_s, "push_s": push_s}

    def on_task_done(self, done: RemoteTaskDone, event: PeerMessage) -> ArrivingGradient | None:
        """Record the scalars and the part of rank 0; return the gradient if it is complete."""
        self._arriving = ArrivingGradient(done, event.at_s, event.contents_s)
        return self._complete()

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
