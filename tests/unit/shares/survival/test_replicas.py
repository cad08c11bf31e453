"""Replicas of several ranks: who is lost with whom, and how the ranks of one meet again after losses among them."""

import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore

from paceline.clusters.launch_env import SURVIVES
from paceline.shares.survival.rejoining import goes_on_without
from paceline.shares.survival.replicas import (
    Replicas,
    await_replica,
    loss_of,
    losses_so_far,
    tell_replica,
    tell_replicas,
    told_replicas,
)
from paceline.shares.survival.roll import BACK, LOST, Event, Roll, tell_loss, told
from rank_threads import LIMIT_S

TWO = Replicas(((0, 1), (2, 3)))
MEMBERS = TWO.of(2)


@st.composite
def replicas_of_one_size(draw):
    shards, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = draw(st.permutations(range(shards * count)))
    return Replicas(tuple(tuple(ranks[each * shards : (each + 1) * shards]) for each in range(count)))


@given(replicas_of_one_size())
def test_each_rank_has_one_peer_in_each_replica(replicas):
    ranks = sorted(rank for members in replicas.members for rank in members)
    for rank in ranks:
        assert sorted(replicas.peers(rank)) == sorted({replicas.peer(rank, other) for other in ranks})
        assert replicas.peer(rank, rank) == rank
        for other in ranks:
            assert replicas.peer(rank, other) in replicas.of(other)
            assert replicas.peers(replicas.peer(rank, other)) == replicas.peers(rank)


@given(replicas_of_one_size(), st.data())
def test_the_ranks_of_a_replica_live_together(replicas, data):
    ranks = st.sampled_from([rank for members in replicas.members for rank in members])
    events = data.draw(st.lists(st.builds(Event, st.sampled_from([LOST, BACK]), ranks)))
    living = set(Roll.called(replicas, events).living)
    latest = {replicas.of(event.rank): event.what for event in events}
    assert living == {rank for members in replicas.members if latest.get(members) != LOST for rank in members}


@pytest.fixture
def store():
    store = HashStore()
    tell_replicas(store, TWO)
    store.set(SURVIVES, "1")
    return store


def test_replicas_are_known_where_they_were_told(store):
    assert told_replicas(store, 4) == TWO
    assert told_replicas(HashStore(), 2) == Replicas(((0,), (1,)))


def test_a_second_loss_in_a_replica_is_one_for_its_own_ranks_alone(store):
    assert tell_loss(store, 3, 4)
    assert not tell_loss(store, 2, 4)
    assert told(store, 4) == [Event(LOST, 3)]
    assert losses_so_far(store, MEMBERS) == 2
    assert losses_so_far(store, TWO.of(0)) == 0
    assert [store.get(loss_of(MEMBERS, number, 2)) for number in (1, 2)] == [b"3", b"2"]


def test_all_ranks_of_a_replica_come_back(store):
    assert not goes_on_without(store, 2, 4, "launch")
    tell_loss(store, 3, 4)
    assert goes_on_without(store, 2, 4, "launch")
    assert goes_on_without(store, 3, 4, "launch")


@pytest.mark.parametrize("dies", [False, True])
def test_ranks_meet_after_the_losses_of_their_replica(store, dies):
    tell_replica(store, TWO, 3)
    found, first = [], threading.Thread(target=lambda: found.append(await_replica(store, MEMBERS, 2, lambda: False)))
    first.start()
    if dies:  # the other one waits by then, or comes later
        tell_replica(store, TWO, 3)
    assert await_replica(store, MEMBERS, 3, lambda: False) == 1 + dies
    first.join(LIMIT_S)
    assert found == [1 + dies]


def test_the_first_rank_that_knows_decides_for_its_replica_whether_it_goes_on(store):
    assert await_replica(store, MEMBERS, 2, lambda: True) is None
    assert await_replica(store, MEMBERS, 3, lambda: False) is None, "although both have come by now"

    tell_replica(store, TWO, 3)
    found = []

    def decide_meanwhile():
        """Say that the others have ended, after the other rank of the replica has gone on."""
        if not found:
            found.append(await_replica(store, MEMBERS, 2, lambda: False))
        return True

    assert await_replica(store, MEMBERS, 3, decide_meanwhile) == 1
    assert found == [1]


WATCHING = """
import sys, time
from torch.distributed import TCPStore
from paceline.shares.survival.own_replica import OwnReplica
connect = lambda: TCPStore("127.0.0.1", int(sys.argv[1]))
replica = OwnReplica((2, 3), 2)
replica.watch(connect())
connect().set("watches", "1")
replica.await_loss()
replica.end(connect())
print("goes on")
"""


@pytest.mark.processes
@pytest.mark.parametrize("has_left", [False, True])
def test_a_process_ends_with_a_rank_of_its_replica_unless_that_has_come_to_its_end(has_left):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", WATCHING, str(store.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        store.wait(["watches"])
        if has_left:
            store.set("paceline/end/3", "1")
        tell_replica(store, TWO, 3)
        printed, told_of = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, printed) == ((0, "goes on\n") if has_left else (-9, ""))
    assert has_left or "rank 2 ends with rank 3, which held another shard of its replica" in told_of
