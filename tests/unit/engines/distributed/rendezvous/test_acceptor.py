"""Connection acceptor: which processes may join, and what is released when they have gone."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import psutil
import pytest

import paceline as pl
from memory_transport import MemoryNetwork, MemoryTransport
from paceline.engines.distributed.rendezvous.acceptor import (
    Acceptor,
    PeerJoined,
    PeerLost,
    PeerMessage,
    PeerRejected,
    QueueHandler,
)
from paceline.engines.distributed.rendezvous.handshake import RunFinished
from paceline.engines.distributed.rendezvous.session import ClientSession
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.messages import (
    End,
    FindLeader,
    Hello,
    LeaderListens,
    LeaderPort,
    Leave,
    PeerAdmitted,
)
from paceline.engines.distributed.transport.security import TokenSecurity
from paceline.engines.distributed.transport.transport import Transport
from paceline.recording.metrics.network_counters import RejectionCause
from this_process import wait_until

DEEP = {"layers": {f"layers_of_a_deep_network.{i}": "Linear(in_features=1, out_features=1)" for i in range(20_000)}}
END = End("updates", "5 updates made", 1.0)


class Server:
    """Acceptor, the queue of its events, and a transport with which others reach it."""

    def __init__(self, transport, job_spec, handler=None):
        self.transport = transport
        self.events = EventQueue()
        handler = handler or QueueHandler(self.events)
        self.acceptor = Acceptor(transport, "127.0.0.1", 0, job_spec, 2, handler)

    def join(self, worker=0, job_spec=None):
        hello = Hello.of("worker 0", worker, job_spec or {})
        return closing(ClientSession.connect(self.transport, self.acceptor.address, hello))

    def connect(self):
        return closing(self.transport.connect(self.acceptor.address))


@contextmanager
def accepting(job_spec=None, handler=None, transport=None):
    server = Server(transport or MemoryTransport(MemoryNetwork()), job_spec or {}, handler)
    try:
        yield server
    finally:
        assert server.acceptor.close()
        server.events.close()
        server.transport.close()


def test_a_job_spec_may_be_long():
    with accepting(DEEP) as server, server.join(job_spec=DEEP):
        assert isinstance(server.events.get(), PeerJoined)


def test_messages_of_a_process_that_has_joined_reach_the_handler():
    with accepting() as server, server.join(1) as session:
        joined = server.events.get()
        assert (joined.peer.peer_id, joined.peer.worker) == (session.peer_id, 1)
        session.connection.send(Leave("SIGTERM"))
        message = server.events.get()
        assert isinstance(message, PeerMessage)
        assert (message.peer_id, message.message) == (session.peer_id, Leave("SIGTERM"))


def test_a_process_that_joins_after_the_end_receives_the_end_of_the_run():
    with accepting() as server:
        server.acceptor.announce_end(END)
        with pytest.raises(RunFinished, match="5 updates made") as finished, server.join():
            pass
        assert finished.value.end == END
        assert server.events.is_empty


def test_a_process_whose_introduction_comes_while_the_acceptor_closes_receives_the_end():
    with accepting() as server, ThreadPoolExecutor() as pool:
        with server.connect() as connection:
            server.acceptor.announce_end(END)
            closing_acceptor = pool.submit(server.acceptor.close)
            connection.send(Hello.of("worker 0", 0, {}))
            assert connection.recv(20) == END
        assert closing_acceptor.result(20)


def test_a_connection_that_is_accepted_while_the_acceptor_closes_is_closed_too():
    with accepting() as server, server.connect() as connection, server.connect() as other:
        server.acceptor.close()
        for each in (connection, other):
            with pytest.raises(ConnectionLost, match="closed"):
                each.recv(20)


def test_a_long_difference_is_shortened():
    with accepting(DEEP) as server:
        with pytest.raises(pl.UsageError, match="and 19990 more") as refused, server.join(job_spec={"layers": {}}):
            pass
        assert len(str(refused.value)) < 1500
        assert server.events.get() == PeerRejected(str(refused.value))
        assert server.transport.counters.rejected[RejectionCause.OTHER_JOB] == 1


@pytest.mark.parametrize("message", [Leave("SIGTERM"), PeerAdmitted(1), END])
def test_a_process_that_does_not_introduce_itself_is_disconnected(message):
    with accepting() as server, server.connect() as connection:
        connection.send(message)
        with pytest.raises(ConnectionLost):
            connection.recv(20)
        assert server.events.is_empty


def test_an_unknown_worker_number_is_rejected_with_what_to_type():
    with accepting() as server:
        with pytest.raises(pl.UsageError, match=r"there is no worker 5, .*RANK") as refused, server.join(5):
            pass
        assert server.events.get() == PeerRejected(str(refused.value))


def test_another_number_of_processes_is_rejected_with_what_to_type():
    said = r"WORLD_SIZE 3, now 4; seed 1, now 2: to join a run, set the WORLD_SIZE of the other processes and the RANK"
    with (
        accepting({"WORLD_SIZE": 3, "seed": 1}) as server,
        pytest.raises(pl.UsageError, match=said),
        server.join(job_spec={"WORLD_SIZE": 4, "seed": 2}),
    ):
        pass


def test_the_port_of_a_leader_is_published_and_found():
    with accepting() as server, server.connect() as follower, server.connect() as leader:
        follower.send(FindLeader(1))
        assert follower.recv(20) == LeaderPort(None)
        leader.send(LeaderListens(1, 1234))
        leader.send(FindLeader(1))
        assert leader.recv(20) == LeaderPort(1234)
        follower.send(FindLeader(1))
        assert follower.recv(20) == LeaderPort(1234)


class FailingHandler(QueueHandler):
    """Handler in which one callback fails."""

    def on_join(self, peer):
        raise ValueError("a mistake in the engine")


def test_an_error_in_a_callback_ends_the_run():
    events = EventQueue()
    with (
        closing(events),
        accepting(handler=FailingHandler(events)) as server,
        server.connect() as connection,
    ):
        connection.send(Hello.of("worker 0", 0, {}))
        assert str(events.get()) == "a mistake in the engine"


def test_nothing_is_left_of_processes_that_have_gone():
    """Neither descriptors nor threads, over TCP."""

    def come_and_go(times):
        for _ in range(times):
            with server.join():
                assert isinstance(server.events.get(), PeerJoined)
            assert isinstance(server.events.get(), PeerLost)

    transport = Transport(lambda: TokenSecurity("a secret"), "1", 5.0)
    with accepting(transport=transport) as server:
        come_and_go(3)
        descriptors, threads = _resources()
        come_and_go(20)
        # A thread of the tensors closes its socket a moment after the loss is told.
        wait_until(lambda: _resources()[0] <= descriptors and _resources()[1] <= threads)


def _resources():
    return len(os.listdir("/dev/fd")), psutil.Process().num_threads()
