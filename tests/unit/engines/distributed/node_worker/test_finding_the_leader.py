"""How the processes of a node find its leader: at rank 0, on a connection over which they have not joined."""

from contextlib import closing
from unittest.mock import Mock

import pytest

from machine_speed import scaled
from memory_transport import MemoryNetwork, MemoryTransport
from paceline.engines.distributed.node_worker.leader import leader_port
from paceline.engines.distributed.rendezvous.acceptor import Acceptor
from paceline.engines.distributed.rendezvous.handshake import RunFinished
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.messages import End, LeaderListens

ANSWER_S = scaled(5.0)


@pytest.fixture
def rank_0():
    """Return the acceptor of rank 0, its handler, and a function that connects to it."""
    with closing(MemoryTransport(MemoryNetwork())) as ours:
        handler = Mock()
        with closing(Acceptor(ours, "", 0, {}, 2, handler)) as acceptor:
            yield acceptor, handler, lambda: ours.connect(acceptor.address)


def test_a_port_is_found_when_the_leader_has_published_it_and_again_after_its_restart(rank_0):
    _, handler, connect = rank_0
    with closing(connect()) as leader, closing(connect()) as follower:
        assert leader_port(follower, 1, ANSWER_S) is None
        for port in (5000, 6000):
            leader.send(LeaderListens(1, port))
            assert leader_port(leader, 1, ANSWER_S) == port
            assert leader_port(follower, 1, ANSWER_S) == port
        assert leader_port(follower, 2, ANSWER_S) is None
    assert handler.mock_calls == []  # nothing has joined


def test_a_process_that_comes_after_the_run_receives_its_end(rank_0):
    acceptor, _, connect = rank_0
    acceptor.announce_end(End("stopped", "5 updates made"))
    with closing(connect()) as leader:
        leader.send(LeaderListens(1, 5000))
        with pytest.raises(RunFinished, match="5 updates made"):
            leader_port(leader, 1, ANSWER_S)


def test_the_end_of_rank_0_ends_the_search(rank_0):
    acceptor, _, connect = rank_0
    follower = connect()
    assert leader_port(follower, 1, ANSWER_S) is None
    acceptor.close()
    with pytest.raises(ConnectionLost):
        leader_port(follower, 1, ANSWER_S)
