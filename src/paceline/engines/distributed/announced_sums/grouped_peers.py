"""Ranks that have the shards of a replica, of which the coordinator sees one worker."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from paceline.engines.distributed.coordinator_tensors import PeerReceiver
from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer
from paceline.engines.distributed.transport.announced_messages import (
    OF_REPLICA,
    GradientRecomputed,
    ShardSaved,
    StateFollows,
    StepMade,
    SumsMade,
)
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.group_connection import GroupConnection
from paceline.engines.distributed.transport.messages import Failed, Leave, Message, Pause, Resume
from paceline.engines.distributed.transport.sum_messages import GroupBroken, StoreKey
from paceline.engines.distributed.transport.task_messages import RemoteTaskCancelled, RemoteTaskDone

Answer = RemoteTaskDone | RemoteTaskCancelled | GradientRecomputed | StateFollows | ShardSaved | SumsMade


class _Replica:
    """Ranks of one worker.

    Args:
        ranks: ranks in the order of their shards.
    """

    def __init__(self, ranks: list[AcceptedPeer]) -> None:
        first, *others = self.ranks = ranks
        connection = GroupConnection([each.connection for each in ranks])
        gpus = [each.gpu for each in ranks]
        self.peer = first._replace(
            connection=cast(Connection, connection),
            others=tuple(each.peer_id for each in others),
            gpu=" ".join(gpus) if all(gpus) else "",
        )
        self._answers: dict[tuple[Any, ...], dict[int, Answer]] = {}  # by what is answered, and by shard
        self.is_leaving = False
        self.broken = 0  # newest generation that one of them has reported as broken

    def whole_answer(self, shard: int, answer: Answer) -> Answer | None:
        """Return the answer of the worker when all its ranks have given theirs; None before."""
        key = _answered(answer)
        answers = self._answers.setdefault(key, {})
        answers[shard] = answer
        if len(answers) < len(self.ranks):
            return None
        del self._answers[key]
        match answers[0]:
            case RemoteTaskDone() as done:
                is_summed = all(cast(RemoteTaskDone, each).is_summed for each in answers.values())
                return msgspec.structs.replace(done, is_summed=is_summed)
            case GradientRecomputed(worker, draw):
                is_here = all(cast(GradientRecomputed, each).is_here for each in answers.values())
                return GradientRecomputed(worker, draw, is_here)
            case ShardSaved(version):
                reasons = (cast(ShardSaved, each).reason for each in answers.values())
                return ShardSaved(version, next(filter(None, reasons), ""))
            case other:
                return other


class GroupedPeers:
    """Receiver of what comes from the ranks of workers, where each rank has one shard of the replica of its worker.

    A worker joins when all its ranks have, and is gone when one of them is. Its ranks get the same messages, and an
    answer counts when all have given it, with the scalars of the first one.

    Args:
        receiver: receiver of what the workers send.
        size: ranks of each worker, >= 2.
    """

    def __init__(self, receiver: PeerReceiver, size: int) -> None:
        self._receiver = receiver
        self._size = size
        self._coming: dict[int, dict[int, AcceptedPeer]] = {}  # by worker and shard
        self._replicas: dict[int, _Replica] = {}  # by id of each rank

    def on_accept(self, peer: AcceptedPeer) -> None:
        """Pass on a process that does not know yet that it takes part."""
        self._receiver.on_accept(peer)

    def on_join(self, peer: AcceptedPeer) -> None:
        """Add a rank; its worker joins with the last one."""
        if peer.shard >= self._size:
            peer.connection.close()
            return
        coming = self._coming.setdefault(peer.worker, {})
        if (previous := coming.get(peer.shard)) is not None:
            previous.connection.close()  # its host may be gone
        coming[peer.shard] = peer
        if len(coming) < self._size:
            return
        del self._coming[peer.worker]
        replica = _Replica([coming[shard] for shard in range(self._size)])
        self._replicas |= {each.peer_id: replica for each in replica.ranks}
        self._receiver.on_join(replica.peer)

    def on_message(self, peer: AcceptedPeer, message: Message, at_s: float, contents_s: float) -> None:
        """Relay a key between the ranks of a worker, and pass on what the worker says."""
        replica = self._replicas.get(peer.peer_id)
        if replica is None:
            return
        told: Message | None = None
        match message:
            case StoreKey(key=key) if key.startswith(OF_REPLICA):
                for other in replica.ranks:
                    if other is not peer:
                        other.connection.send(message)
            case StoreKey() | Failed():
                told = message
            case GroupBroken(generation) if generation > replica.broken:
                replica.broken = generation
                told = message
            case Leave() if not replica.is_leaving:
                replica.is_leaving = True
                told = message
            case (
                RemoteTaskDone()
                | RemoteTaskCancelled()
                | GradientRecomputed()
                | StateFollows()
                | ShardSaved()
                | SumsMade()
            ):
                told = replica.whole_answer(peer.shard, message)
            case StepMade(version, _, not_finite) if peer.shard and not_finite:
                told = StepMade(version, b"", not_finite)
            case StepMade() | Pause() | Resume() if not peer.shard:
                told = message
        if told is not None:
            self._receiver.on_message(replica.peer, told, at_s, contents_s)

    def on_leave(self, peer: AcceptedPeer, reason: str) -> None:
        """Note that a rank is gone, and let the others of its worker go."""
        replica = self._replicas.get(peer.peer_id)
        if replica is None:
            coming = self._coming.get(peer.worker, {})
            if coming.get(peer.shard) is peer:
                del coming[peer.shard]
            return
        for each in replica.ranks:
            del self._replicas[each.peer_id]
            each.connection.close()
        self._receiver.on_leave(replica.peer, reason)

    def on_reject(self, reason: str) -> None:
        """Pass on a process that may not take part."""
        self._receiver.on_reject(reason)

    def fail(self, error: Exception) -> None:
        """Pass on an error in another callback."""
        self._receiver.fail(error)


def _answered(answer: Answer) -> tuple[Any, ...]:
    """Return what an answer is about, equal for those of all ranks of a worker."""
    match answer:
        case RemoteTaskDone(draw=draw) | RemoteTaskCancelled(draw=draw):
            return RemoteTaskDone, draw
        case GradientRecomputed(worker, draw):
            return GradientRecomputed, worker, draw
        case SumsMade(generation):
            return SumsMade, generation
        case ShardSaved(version):
            return ShardSaved, version
        case StateFollows():
            return (StateFollows,)
