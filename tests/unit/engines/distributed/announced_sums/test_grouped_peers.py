"""Ranks with a shard each, of which the coordinator sees one worker."""

import pytest

from group_members import Wire, peer
from paceline.core.gradient import NOT_MEASURED
from paceline.engines.distributed.announced_sums.grouped_peers import GroupedPeers
from paceline.engines.distributed.transport.announced_messages import (
    OF_REPLICA,
    GradientRecomputed,
    StateFollows,
    StepMade,
    SumsMade,
)
from paceline.engines.distributed.transport.messages import Leave
from paceline.engines.distributed.transport.sum_messages import GroupBroken, StoreKey
from paceline.engines.distributed.transport.task_messages import CancelTask, RemoteTaskCancelled, RemoteTaskDone

SIZE = 3
KEY = StoreKey(4, f"{OF_REPLICA}/rank", b"address")


class Receiver:
    """Receiver that notes what it gets."""

    def __init__(self):
        self.joined, self.messages, self.left = [], [], []

    def on_join(self, peer):
        self.joined.append(peer)

    def on_message(self, peer, message, at_s, contents_s):
        self.messages.append((peer.worker, message))

    def on_leave(self, peer, reason):
        self.left.append((peer.peer_id, reason))


class ClosingWire(Wire):
    is_open = True

    def close(self):
        self.is_open = False


def made(worker=0, shards=range(SIZE)):
    """Return the receiver, the grouped peers, and the ranks of a worker, in the order in which they have come."""
    receiver = Receiver()
    grouped = GroupedPeers(receiver, SIZE)
    ranks = [peer(worker, ClosingWire())._replace(peer_id=10 + shard, shard=shard, gpu=str(shard)) for shard in shards]
    for each in ranks:
        grouped.on_join(each)
    return receiver, grouped, ranks


def done(draw, **about):
    return RemoteTaskDone(draw=draw, busy_s=0.0, measured=NOT_MEASURED._replace(samples=1), **about)


def say(grouped, rank, message):
    grouped.on_message(rank, message, 0.0, 0.0)


def test_a_worker_joins_with_its_last_rank_and_all_get_what_it_is_sent():
    receiver, grouped, ranks = made(shards=[2, 0])
    assert receiver.joined == []
    last = peer(0, ClosingWire())._replace(peer_id=11, shard=1)
    grouped.on_join(last)
    [joined] = receiver.joined
    assert (joined.peer_id, joined.others, joined.gpu) == (10, (11, 12), "")
    joined.connection.send(CancelTask(3))
    assert all(each.connection.sent == [CancelTask(3)] for each in [*ranks, last])


def test_nothing_counts_before_all_ranks_of_a_worker_are_there():
    receiver, grouped, ranks = made(shards=[0, 1])
    say(grouped, ranks[0], done(1))
    grouped.on_leave(ranks[1], "gone")
    grouped.on_join(ranks[1]._replace(peer_id=20))
    grouped.on_join(ranks[1]._replace(peer_id=21))  # in place of the one before
    assert (receiver.messages, receiver.joined, receiver.left) == ([], [], [])
    assert not ranks[1].connection.is_open
    grouped.on_join(peer(0, ClosingWire())._replace(shard=SIZE))
    assert receiver.joined == []


@pytest.mark.parametrize(
    "answers",
    [
        [done(1), done(1), done(1)],
        [RemoteTaskCancelled(1)] * SIZE,
        [GradientRecomputed(5, 1, True)] * SIZE,
        [SumsMade(4, 7)] * SIZE,
        [StateFollows()] * SIZE,
    ],
)
def test_an_answer_counts_when_all_ranks_have_given_it(answers):
    receiver, grouped, ranks = made(worker=2)
    for _ in range(2):
        for rank, answer in zip(reversed(ranks), answers, strict=True):
            before = len(receiver.messages)
            say(grouped, rank, answer)
            assert len(receiver.messages) == before + (rank is ranks[0])
    assert receiver.messages == [(2, answers[0])] * 2


def test_what_not_all_ranks_have_is_not_there():
    receiver, grouped, ranks = made()
    for rank, is_here in zip(ranks, [True, False, True], strict=True):
        say(grouped, rank, done(1, is_summed=is_here))
        say(grouped, rank, GradientRecomputed(5, 1, is_here))
    assert receiver.messages == [(0, done(1)), (0, GradientRecomputed(5, 1, False))]


def test_keys_of_a_replica_stay_among_its_ranks():
    receiver, grouped, ranks = made()
    other = [peer(1, ClosingWire())._replace(peer_id=20 + shard, shard=shard) for shard in range(SIZE)]
    for each in other:
        grouped.on_join(each)
    say(grouped, ranks[1], KEY)
    assert [each.connection.sent for each in [*ranks, *other]] == [[KEY], [], [KEY], [], [], []]
    say(grouped, ranks[1], StoreKey(5, "1/ready/0", b""))
    assert receiver.messages == [(0, StoreKey(5, "1/ready/0", b""))]


def test_a_broken_group_and_a_farewell_are_told_once_and_every_rank_tells_that_its_shard_is_not_finite():
    receiver, grouped, ranks = made()
    for rank in ranks:
        say(grouped, rank, GroupBroken(4, "cut", False))
        say(grouped, rank, Leave("SIGTERM"))
        say(grouped, rank, StepMade(3, b"step", ""))
    say(grouped, ranks[2], StepMade(3, b"step", "weight is inf"))
    told = [GroupBroken(4, "cut", False), Leave("SIGTERM"), StepMade(3, b"step", ""), StepMade(3, b"", "weight is inf")]
    assert [message for _, message in receiver.messages] == told


def test_a_worker_is_gone_with_one_of_its_ranks_and_comes_back_with_other_ones():
    receiver, grouped, ranks = made()
    grouped.on_leave(ranks[1], "killed")
    assert receiver.left == [(10, "killed")]
    assert not any(each.connection.is_open for each in (ranks[0], ranks[2]))
    for each in (ranks[0], ranks[2]):
        grouped.on_leave(each, "closed")
    assert len(receiver.left) == 1
    say(grouped, ranks[0], done(1))
    assert receiver.messages == []
    for shard in range(SIZE):
        grouped.on_join(ranks[shard]._replace(peer_id=30 + shard))
    assert [each.peer_id for each in receiver.joined] == [10, 30]
