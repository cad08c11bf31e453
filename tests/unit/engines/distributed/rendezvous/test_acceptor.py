"""Connection acceptor: which processes may join, and what is released when they have gone."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from unittest.mock import patch

import psutil
import pytest
import torch

import paceline as pl
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup
from paceline.engines.distributed.rendezvous import rendezvous as rendezvous_module
from paceline.engines.distributed.rendezvous.acceptor import (
    Acceptor,
    PeerJoined,
    PeerLost,
    PeerRejected,
    QueueHandler,
)
from paceline.engines.distributed.rendezvous.handshake import RunFinished, authenticate_self, sign_end
from paceline.engines.distributed.rendezvous.rendezvous import Rendezvous
from paceline.engines.distributed.transport import gloo, keepalive
from paceline.engines.distributed.transport.connection import UNAUTHENTICATED_BYTES, Connection, ConnectionLost
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.messages import End, Hello, Proof
from paceline.engines.distributed.transport.task_messages import ControlHeader
from paceline.engines.distributed.transport.transport import GlooTransport

TOKEN = "a secret"
DEEP = {"layers": {f"layers_of_a_deep_network.{i}": "Linear(in_features=1, out_features=1)" for i in range(20_000)}}


@contextmanager
def accepting(job_spec=None, processes=2):
    """Yield an endpoint with an acceptor, and the queue of its events."""
    with acceptor_at(job_spec, processes) as (_, endpoint, events):
        yield endpoint, events


@contextmanager
def acceptor_at(job_spec=None, processes=2):
    """Yield an acceptor, too."""
    rendezvous = Rendezvous(*GlooTransport(60).listen("127.0.0.1"))
    events = EventQueue()
    acceptor = Acceptor(rendezvous, TOKEN, job_spec or {}, [None] * processes, QueueHandler(events))
    try:
        yield acceptor, rendezvous.endpoint, events
    finally:
        assert acceptor.close()
        events.close()


def connect(endpoint):
    store = endpoint.client()
    peer_id = int(store.add(rendezvous_module.PEER_COUNT, 1))
    store.set(rendezvous_module._ready_key(peer_id), "ready")
    return endpoint.transport.connect(endpoint, rendezvous_module._connection_key(peer_id), 1)


def hello(worker=0, job_spec=None):
    return Hello("worker 0", worker, job_spec or {})


def test_a_job_spec_may_be_long():
    with accepting(DEEP) as (endpoint, events), closing(connect(endpoint)) as connection:
        authenticate_self(connection, TOKEN, hello(job_spec=DEEP))
        assert isinstance(events.get(), PeerJoined)


END = End("updates", "5 updates made", 1.0)


def test_a_process_that_joins_after_the_end_receives_the_end_of_the_run():
    with acceptor_at() as (acceptor, endpoint, events), closing(connect(endpoint)) as connection:
        acceptor.announce_end(END)
        with pytest.raises(RunFinished, match="5 updates made") as finished:
            authenticate_self(connection, TOKEN, hello())
        assert finished.value.end == END
        assert events.is_empty


@pytest.fixture
def late(monkeypatch):
    """The settings of a process that comes back."""
    named = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PACELINE_TOKEN": TOKEN}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    return pl.Torchrun(start_timeout_s=5.0)


def test_a_process_that_comes_later_reads_that_the_run_is_over(late):
    with acceptor_at() as (acceptor, endpoint, _):
        acceptor.announce_end(END)
        with pytest.raises(RunFinished) as finished:
            rendezvous_module.join(endpoint, late)
        assert finished.value.end == END
        assert int(endpoint.client().add(rendezvous_module.PEER_COUNT, 0)) == 0


@pytest.mark.parametrize("notice", ["no JSON", "[]", "{}", sign_end(END, "another secret")])
def test_an_end_that_is_signed_with_another_token_is_ignored(notice, late):
    with acceptor_at() as (_, endpoint, _):
        endpoint.client().set(rendezvous_module.ENDED, notice)
        _, connection = rendezvous_module.join(endpoint, late)
        connection.close()


def test_a_long_difference_is_shortened():
    with accepting(DEEP) as (endpoint, events), closing(connect(endpoint)) as connection:
        with pytest.raises(pl.UsageError, match="and 19990 more") as refused:
            authenticate_self(connection, TOKEN, hello(job_spec={"layers": {}}))
        assert len(str(refused.value)) < 1500
        connection.close()
        assert events.get() == PeerRejected(str(refused.value))


def test_a_peer_that_is_not_authenticated_may_not_send_long_messages():
    with accepting() as (endpoint, _), closing(connect(endpoint)) as connection:
        connection.recv()
        connection.send(
            ControlHeader(UNAUTHENTICATED_BYTES + 1), [torch.zeros(UNAUTHENTICATED_BYTES + 1, dtype=torch.uint8)]
        )
        with pytest.raises(ConnectionLost):
            connection.recv()


def test_a_process_sends_nothing_about_the_job_before_the_server_has_proved_its_token():
    sent = []
    with accepting(DEEP) as (endpoint, _), closing(connect(endpoint)) as connection:
        connection.send = sent.append
        joining = threading.Thread(target=_join_in_vain, args=[connection])
        joining.start()
        while not sent:
            pass
        assert [type(message) for message in sent] == [Proof]
        connection.close()
        joining.join()


def _join_in_vain(connection):
    with pytest.raises(ConnectionLost):
        authenticate_self(connection, TOKEN, hello(job_spec=DEEP))


def test_nothing_is_left_of_a_process_that_has_gone():
    def come_and_go(times):
        for _ in range(times):
            with closing(connect(endpoint)) as connection:
                authenticate_self(connection, TOKEN, hello())
                assert isinstance(events.get(), PeerJoined)
            assert isinstance(events.get(), PeerLost)

    with accepting() as (endpoint, events):
        come_and_go(3)
        before = _open_files(), _threads()
        come_and_go(20)
        now = _open_files(), _threads()
        assert all(later <= earlier + 4 for earlier, later in zip(before, now, strict=True)), (before, now)


def _open_files():
    return len(os.listdir("/dev/fd"))


def _threads():
    """Return how many threads this process has, those that gloo has started included."""
    return psutil.Process().num_threads()


def test_an_unknown_worker_number_is_rejected_with_what_to_type():
    with accepting() as (endpoint, events), closing(connect(endpoint)) as connection:
        with pytest.raises(pl.UsageError, match=r"there is no worker 5, .*RANK") as refused:
            authenticate_self(connection, TOKEN, hello(worker=5))
        connection.close()
        assert events.get() == PeerRejected(str(refused.value))


def test_another_number_of_processes_is_rejected_with_what_to_type():
    said = r"WORLD_SIZE 3, now 4; seed 1, now 2: to join a run, set the WORLD_SIZE of the other processes and the RANK"
    with (
        accepting({"WORLD_SIZE": 3, "seed": 1}) as (endpoint, _),
        closing(connect(endpoint)) as connection,
        pytest.raises(pl.UsageError, match=said),
    ):
        authenticate_self(connection, TOKEN, hello(job_spec={"WORLD_SIZE": 4, "seed": 2}))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_the_connections_of_gloo_end_when_their_host_is_silent(host):
    endpoint, _store = GlooTransport(60).listen(host)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        users = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
        with patch.object(gloo, "open_sockets", set):  # as if all of them were new
            ours = _together(lambda side: endpoint.transport.connect(endpoint, "key", side), 2)
            of_connections = _limited()
            theirs = _together(lambda rank: _group(rank, endpoint), 3)
        assert (len(of_connections), len(_limited())) == (2, 2 + 6)
        assert not {user.fileno() for user in users} & set(_limited())
        for each in [*ours, *theirs]:
            (each.close if isinstance(each, Connection) else each.abort)()
        for user in users:
            user.close()


def _group(rank, endpoint):
    group = ElasticGroup("a secret", rank, 3)
    group.connect(endpoint)
    return group


def _together(make, size):
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


def _limited():
    """Return the descriptors of connections that end when their host is silent."""
    found = []
    for file in keepalive._descriptors().values():
        with socket.socket(fileno=os.dup(file)) as connection:
            if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000:
                found.append(file)
    return found
