"""Client session: how a process joins a server, learns that it is gone, and ends."""

import queue
import threading
from contextlib import closing, contextmanager

import pytest
import torch

import paceline as pl
from machine_speed import scaled
from memory_transport import MemoryNetwork, MemoryTransport
from paceline.engines.distributed.rendezvous import session as session_module
from paceline.engines.distributed.rendezvous.handshake import RunFinished
from paceline.engines.distributed.rendezvous.session import ClientSession, ServerLostError
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.messages import Accepted, End, Failed, Hello, Leave, Rejected
from paceline.engines.distributed.transport.task_messages import RemoteEvaluateTask

HELLO = Hello.of("worker 0", 0, {"seed": 1})
ADMITTED = Accepted(7)
END = End("updates", "5 updates made", 1.0)
WAIT_S = scaled(10.0)


class Server:
    """Server that answers each process with one message.

    Attributes:
        connections: connections that the test has not looked at yet.
        all_connections: connections that were made.
        received: messages, and the reasons of ends.
    """

    def __init__(self, answer):
        self._answer = answer
        self.connections = queue.Queue()
        self.all_connections = []
        self.received = queue.Queue()

    def on_connection(self, connection):
        self.all_connections.append(connection)
        connection.listen(lambda message, *times: self.received.put(message), self.received.put)
        if self._answer is not None:
            connection.send(self._answer)
        self.connections.put(connection)


@contextmanager
def server(answer=ADMITTED):
    """Yield a server and a function with which a process joins it."""
    with closing(MemoryTransport(MemoryNetwork())) as transport:
        made = Server(answer)
        with closing(transport.listen("127.0.0.1", 0, made.on_connection, pytest.fail)) as listener:
            yield made, lambda: ClientSession.connect(transport, listener.address, HELLO)
        for connection in made.all_connections:
            connection.close()


class Noted:
    """Callbacks of a session that note what they receive."""

    def __init__(self, session):
        self.messages, self.errors = queue.Queue(), queue.Queue()
        session.listen(self.messages.put, self.errors.put)


def test_a_process_introduces_itself_and_receives_its_id():
    with server() as (its, join), closing(join()) as session:
        assert its.received.get(timeout=WAIT_S) == HELLO
        assert session.peer_id == 7


@pytest.mark.parametrize(
    ("answer", "expected", "text"),
    [
        (Rejected("another seed"), pl.UsageError, "another seed"),
        (END, RunFinished, "5 updates made"),
        (Leave("SIGTERM"), ConnectionLost, "rank 0 has sent Leave to a process that joins"),
        (None, ConnectionLost, r"no message came within 0\.05 s"),
    ],
    ids=["rejected", "ended", "nonsense", "silent"],
)
def test_a_process_that_is_not_admitted_closes_its_connection(answer, expected, text, monkeypatch):
    if answer is None:
        monkeypatch.setattr(session_module, "ANSWER_TIMEOUT_S", 0.05)
    with server(answer) as (its, join):
        with pytest.raises(expected, match=text):
            join()
        assert its.received.get(timeout=WAIT_S) == HELLO
        assert isinstance(its.received.get(timeout=WAIT_S), str)  # the end of the connection


def test_the_loss_of_the_server_is_reported_once_after_its_last_message():
    with server() as (its, join), closing(join()) as session:
        noted = Noted(session)
        connection = its.connections.get(timeout=WAIT_S)
        connection.send(RemoteEvaluateTask(1))
        connection.close()
        assert noted.messages.get(timeout=WAIT_S) == RemoteEvaluateTask(1)
        error = noted.errors.get(timeout=WAIT_S)
        assert isinstance(error, ServerLostError)
        assert str(error) == "rank 0 is gone: the other process has closed the connection"
    assert noted.errors.empty()


def test_the_end_of_the_connection_after_the_end_of_the_run_is_no_error():
    with server() as (its, join), closing(join()) as session:
        noted = Noted(session)
        connection = its.connections.get(timeout=WAIT_S)
        connection.send(END)
        connection.close()
        assert noted.messages.get(timeout=WAIT_S) == END
    assert noted.errors.empty()


def test_the_first_error_of_a_callback_is_the_last_thing_that_is_reported():
    with server() as (its, join), closing(join()) as session:
        connection = its.connections.get(timeout=WAIT_S)
        seen, errors = [], queue.Queue()

        def fail(message):
            seen.append(message)
            raise ValueError(f"version {message.version}")

        session.listen(fail, errors.put)
        for version in (1, 2):
            connection.send(RemoteEvaluateTask(version))
        connection.close()
        assert str(errors.get(timeout=WAIT_S)) == "version 1"
    assert errors.empty()
    assert [message.version for message in seen] == [1]


@pytest.mark.parametrize("last", [Leave("SIGTERM"), Failed("ValueError: no number", False)])
@pytest.mark.parametrize("answers", [END, None], ids=["the end", "closing"])
def test_a_last_message_is_received_before_the_process_ends(last, answers):
    with server() as (its, join), closing(join()) as session:
        Noted(session)
        connection = its.connections.get(timeout=WAIT_S)
        assert its.received.get(timeout=WAIT_S) == HELLO
        finishing = threading.Thread(target=session.finish, args=[last], daemon=True)
        finishing.start()
        assert its.received.get(timeout=WAIT_S) == last
        assert finishing.is_alive()  # it waits for an answer
        if answers is None:
            connection.close()
        else:
            connection.send(answers)
        finishing.join(WAIT_S / 2)
        assert not finishing.is_alive()


def test_a_process_does_not_end_while_it_sends_its_last_gradient(monkeypatch):
    monkeypatch.setattr(session_module, "LEAVE_TIMEOUT_S", 0.01)
    gradient, received = torch.arange(4_000_000, dtype=torch.float32), torch.empty(4_000_000)
    with server() as (its, join), closing(join()) as session:
        Noted(session)
        connection = its.connections.get(timeout=WAIT_S)
        assert its.received.get(timeout=WAIT_S) == HELLO
        session.connection.send_bucket(0, gradient)
        finishing = threading.Thread(target=session.leave, args=["SIGTERM"], daemon=True)
        finishing.start()
        finishing.join(0.2)
        assert finishing.is_alive()
        connection.post_buckets([received])  # the server reads it now
        assert its.received.get(timeout=WAIT_S) == Leave("SIGTERM")
        finishing.join(WAIT_S)
        assert not finishing.is_alive()
    assert torch.equal(received, gradient)


def test_a_process_that_has_received_the_end_sends_nothing_more():
    with server() as (its, join):
        with closing(join()) as session:
            noted = Noted(session)
            its.connections.get(timeout=WAIT_S).send(END)
            assert noted.messages.get(timeout=WAIT_S) == END
            while not session._is_over.is_set():  # set right after the callback
                pass
            session.leave("SIGTERM")
        assert its.received.get(timeout=WAIT_S) == HELLO
        assert isinstance(its.received.get(timeout=WAIT_S), str)


def test_no_callback_comes_after_closing():
    with server() as (its, join):
        session = join()
        noted = Noted(session)
        its.connections.get(timeout=WAIT_S)
        session.close()
        assert noted.errors.qsize() == 1  # of the connection that this process has closed
        session.close()
        assert noted.errors.qsize() == 1
