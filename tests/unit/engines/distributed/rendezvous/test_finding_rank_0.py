"""How the other ranks find rank 0, over TCP: every server that answers at its address has to prove that it is one."""

import queue
import socket
import threading
import weakref
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from hashlib import sha256

import pytest
from torch import distributed as dist

import paceline as pl
from machine_speed import scaled
from paceline.clusters.launch_env import LaunchEnv
from paceline.engines.distributed.rendezvous import rendezvous
from paceline.engines.distributed.rendezvous.acceptor import PeerJoined, QueueHandler
from paceline.engines.distributed.rendezvous.job_security import JobSecurity
from paceline.engines.distributed.rendezvous.rendezvous import ADDRESS, is_restart, join_rank_0, listen_as_rank_0
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.messages import Hello
from paceline.engines.distributed.transport.transport import Transport

TOKEN = "l3Q1x0b9vYk7Zr5TnW2mDfGhJpSaUeCi8oXq6wRtBzN"  # as make_token makes them
OTHER_TOKEN = TOKEN[::-1]
HELLO = Hello.of("worker 0", 0, {})
WAIT_S = scaled(20.0)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.fixture
def agent_store():
    """Return the store of torchrun's agents."""
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def cluster(rank, port, *, has_agent=False, token=TOKEN, **options):
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": str(has_agent), "PACELINE_TOKEN": token}
    options = {"start_timeout_s": 10.0, **options}
    return pl.Torchrun(ranks=LaunchEnv.from_environment(variables), **options)


def transport_of(settings):
    made = Transport(JobSecurity(settings), "1", 5.0)
    made.poll_s = 0.01
    return made


@contextmanager
def rank_0(settings):
    """Yield the address of rank 0 and the queue of its events."""
    with (
        closing(transport_of(settings)) as transport,
        closing(EventQueue()) as events,
        closing(listen_as_rank_0(settings, transport, {}, 1, QueueHandler(events))) as acceptor,
    ):
        yield acceptor.address, events


@contextmanager
def impostor(settings):
    """Yield the address of a server of another job, and the queue of its authenticated connections."""
    connections = queue.Queue()
    with (
        closing(transport_of(settings)) as transport,
        closing(transport.listen("127.0.0.1", 0, connections.put, connections.put)) as listener,
    ):
        yield listener.address, connections


def assert_joins(settings, events):
    with closing(transport_of(settings)) as transport, closing(join_rank_0(settings, transport, HELLO)) as session:
        assert isinstance(joined := events.get(), PeerJoined)
        assert joined.peer.peer_id == session.peer_id


def error_of_joining(settings):
    with closing(transport_of(settings)) as transport, pytest.raises((pl.UsageError, pl.RunError)) as raised:
        join_rank_0(settings, transport, HELLO)
    return raised.value


@contextmanager
def started(call, *arguments):
    """Call a function in a thread; its exception is raised here at the end."""
    raised = []

    def run():
        try:
            call(*arguments)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(WAIT_S)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def test_without_an_agent_rank_0_listens_on_the_port_of_the_master():
    port = free_port()
    with rank_0(cluster(0, port)) as (address, events):
        assert address == ("127.0.0.1", port)
        assert_joins(cluster(1, port), events)


def test_a_given_port_replaces_that_of_the_master():
    port = free_port()
    given = {"address": f"127.0.0.1:{port}"}
    with rank_0(cluster(0, 1, **given)) as (address, events):
        assert address == ("127.0.0.1", port)
        assert_joins(cluster(1, 1, **given), events)


def test_where_an_agent_has_the_port_rank_0_takes_a_free_one_and_publishes_it(agent_store):
    with rank_0(cluster(0, agent_store.port, has_agent=True)) as (address, events):
        assert address[1] != agent_store.port
        assert agent_store.get(ADDRESS).decode() == f"127.0.0.1:{address[1]}"
        assert_joins(cluster(1, agent_store.port, has_agent=True), events)


def test_rank_0_makes_one_client_of_the_store_and_closes_it(agent_store, monkeypatch):
    made = []

    class Client(dist.TCPStore):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(weakref.ref(self))

    monkeypatch.setattr(rendezvous.dist, "TCPStore", Client)
    settings = cluster(0, agent_store.port, has_agent=True)
    assert not is_restart(settings, "a run")
    with rank_0(settings) as (address, _):
        assert agent_store.get(ADDRESS).decode().endswith(f":{address[1]}")
        assert [client() for client in made] == [None]


def test_a_run_in_a_folder_whose_name_is_not_utf_8_is_counted(agent_store):
    settings = cluster(0, agent_store.port, has_agent=True)
    assert [is_restart(settings, "caf\udce9") for _ in range(2)] == [False, True]


def test_a_count_of_starts_that_a_stranger_has_overwritten_is_reported_and_ignored(agent_store, caplog):
    settings = cluster(0, agent_store.port, has_agent=True)
    agent_store.set(f"paceline/begun/{sha256(b'a run').hexdigest()}", "no number")
    assert not is_restart(settings, "a run")
    [message] = caplog.messages
    assert f"torchrun's store at 127.0.0.1:{agent_store.port} does not count the starts of this run" in message
    assert "\n" not in message
    with rank_0(settings) as (_, events):  # with a new client
        assert_joins(cluster(1, agent_store.port, has_agent=True), events)


def test_a_store_that_is_gone_is_one_line_for_rank_0(monkeypatch):
    monkeypatch.setattr(rendezvous, "AGENT_STORE_TIMEOUT", timedelta(seconds=0.01))
    settings = cluster(0, port := free_port(), has_agent=True)
    with pytest.raises(pl.RunError, match=rf"torchrun's store at 127.0.0.1:{port} .*pl\.Torchrun\(address=") as raised:
        rank_0(settings).__enter__()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("old", ["127.0.0.1:{}", "no address", "127.0.0.1:port"])
def test_an_address_at_which_nothing_listens_is_tried_until_it_is_replaced(agent_store, old):
    agent_store.set(ADDRESS, old.format(free_port()))
    settings = {"port": agent_store.port, "has_agent": True}
    with ExitStack() as later:
        joined = threading.Event()

        def join():
            with closing(transport_of(cluster(1, **settings))) as transport:
                join_rank_0(cluster(1, **settings), transport, HELLO).close()
            joined.set()

        with started(join):
            assert not joined.wait(0.1)
            later.enter_context(rank_0(cluster(0, **settings)))
            assert joined.wait(WAIT_S)


def test_a_rank_that_is_led_to_a_server_without_the_token_sends_it_nothing_and_names_it(
    agent_store, monkeypatch, caplog
):
    monkeypatch.setattr(rendezvous, "OTHER_SERVER_S", 0.2)
    with impostor(cluster(0, 1, token=OTHER_TOKEN)) as ((host, port), connections):
        agent_store.set(ADDRESS, f"{host}:{port}")
        error = error_of_joining(cluster(1, agent_store.port, has_agent=True))
        assert isinstance(error, pl.UsageError)
        assert f"{host}:{port} is not of this job" in str(error)
        assert "set PACELINE_TOKEN to the same value on every host" in str(error)
        assert connections.empty()
    assert [f"{host}:{port}" in message for message in caplog.messages if "rank 0 is not there" in message] == [True]


def test_a_rank_that_was_led_to_another_server_joins_when_the_address_is_right(agent_store):
    settings = {"port": agent_store.port, "has_agent": True}
    with impostor(cluster(0, 1, token=OTHER_TOKEN)) as ((host, port), _), ExitStack() as later:
        agent_store.set(ADDRESS, f"{host}:{port}")
        refused = threading.Event()

        class Led(Transport):
            def connect(self, address):
                try:
                    return super().connect(address)
                finally:
                    refused.set()

        def join():
            worker = cluster(1, **settings)
            with closing(Led(JobSecurity(worker), "1", 5.0)) as transport:
                join_rank_0(worker, transport, HELLO).close()

        with started(join):
            assert refused.wait(WAIT_S)
            _, events = later.enter_context(rank_0(cluster(0, **settings)))
            assert isinstance(events.get(), PeerJoined)


def test_a_server_that_closes_each_connection_is_not_taken_for_one_with_another_token(monkeypatch):
    monkeypatch.setattr(rendezvous, "OTHER_SERVER_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        closing_thread = threading.Thread(target=close_all, args=[sock], daemon=True)
        closing_thread.start()
        error = error_of_joining(cluster(1, sock.getsockname()[1], start_timeout_s=0.3))
        sock.shutdown(socket.SHUT_RDWR)
    closing_thread.join(WAIT_S)
    assert isinstance(error, pl.RunError)
    assert "start_timeout_s=0.3" in str(error)


def close_all(sock):
    while True:
        try:
            connection, _ = sock.accept()
            with connection:
                connection.recv(1 << 16)
        except ConnectionError:
            continue
        except OSError:
            return


def test_a_rank_without_encryption_is_advised_where_rank_0_uses_tls():
    with rank_0(cluster(0, port := free_port())):
        error = error_of_joining(cluster(1, port, start_timeout_s=0.2, encrypt=False))
    assert isinstance(error, pl.RunError)
    assert str(error).endswith("if rank 0 uses TLS, leave out encrypt=False here")


def test_a_rank_with_tls_is_advised_where_rank_0_does_not_encrypt(monkeypatch):
    monkeypatch.setattr(rendezvous, "OTHER_SERVER_S", 0.1)
    with rank_0(cluster(0, port := free_port(), encrypt=False)):
        error = error_of_joining(cluster(1, port))
    assert isinstance(error, pl.UsageError)
    assert str(error).endswith("and encrypt to the same value for every rank")
