"""Processes that have the token, and send what no process of paceline sends.

Such a process can do harm, and these tests show where it ends. It can take the number of a worker, whose process then
loses its connection; send gradients, losses and times that are wrong but finite; end the run by the report of an error
of the user; hold files and memory, about 0.3 MB a connection; and keep the thread of the sockets busy. It cannot
execute code, make a server allocate more memory than it sends bytes, or end rank 0 by a message that is not valid.
"""

import threading
import time
import tracemalloc

import msgspec
import pytest

import paceline as pl
from attackers import LIMIT_S, memory_mb, security, serving, transport
from end_when import FOREVER, EndWhen
from paceline.core.events import Measured
from paceline.engines.distributed.rendezvous import acceptor
from paceline.engines.distributed.rendezvous.handshake import why_rejected
from paceline.engines.distributed.transport import messages, task_messages
from paceline.engines.distributed.transport import transport as transport_module
from paceline.engines.distributed.transport.connection import MAX_WAITING, MOST_OF_PEER_BYTES, ConnectionLost
from paceline.engines.distributed.transport.messages import Accepted, End, Hello, Rejected
from paceline.engines.distributed.transport.readers import MESSAGE, TENSOR
from paceline.engines.distributed.transport.security import Preamble
from ranks import lost
from selections import parametrize_few
from tcp_threads import ranks
from this_process import wait_until
from tiny_jobs import tiny_job

NESTED = 300
HELLO = Hello.of("attacker", 0, {})


def packed(*fields, buckets=b"", tensors=0):
    content = msgspec.msgpack.encode(fields)
    return MESSAGE.pack(len(content), len(buckets), tensors) + content + buckets


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def state(dtype, shape):
    """Return an end of the run with a tensor."""
    content = msgspec.msgpack.encode(End("completed", "", tensors={"final": [dtype, shape]}))
    return MESSAGE.pack(len(content), 0, 0) + content


def deep_greeting(depth):
    return packed("Hello", "a", 0, b"\x81\xa4deep" + b"\x91" * depth + b"\xc0")


BYTES = {
    "no message": MESSAGE.pack(10, 0, 0) + b"\xc1" * 10,
    "random bytes": b"\x00\x00\x00\x40" + bytes(range(256)),
    "a huge size": MESSAGE.pack(2**32 - 1, 0, 0),
    "small buckets that are large": MESSAGE.pack(10, 2**32 - 1, 0),
    "no size": MESSAGE.pack(0, 0, 0),
    "an unknown kind": packed("Bogus", 1),
    "a pickle": packed("Hello", b"cos\nsystem\n(S'true'\ntR."),
    "wrong types": packed("Hello", 1, "zero", []),
    "a nested value": packed("Hello", "attacker", 0, msgspec.msgpack.encode({"deep": nested(NESTED)})),
    "a deeply nested value": MESSAGE.pack(100_000, 0, 0) + b"\x91" * 100_000,
    "a greeting with a deeply nested value": deep_greeting(20_000),
    "an absurd tensor": state("float32", [1 << 38]),
    "more than memory": state("uint8", [1 << 62, 4]),
    "many dimensions": state("uint8", [2**63 - 1] * 1000),
    "a function for a dtype": state("load", [1]),
    "a module for a dtype": state("_dynamo", [1]),
    "a state": state("uint8", [10]),
    "negative lengths": state("uint8", [-1, -1]),
    "a message of rank 0": packed("Accepted", 7),
    "a task before the greeting": packed("RemoteTask", 1, 1, True, 0.0, None, None),
}


def send_raw(connection, content):
    connection._control.send([memoryview(content)])


def is_ended(connection):
    """Return whether the server rejects this process, or closes its connection."""
    try:
        while not isinstance(connection.recv(LIMIT_S), Rejected):
            pass
    except ConnectionLost as error:
        return "no message came" not in str(error)
    return True


@pytest.fixture
def hello(monkeypatch):
    """Introductions of the workers that rank 0 has admitted, which an attacker with the token can send too."""
    seen = []
    why_rejected = acceptor.why_rejected

    def look(hello, *arguments):
        seen.append(hello)
        return why_rejected(hello, *arguments)

    monkeypatch.setattr(acceptor, "why_rejected", look)
    return seen


def attacked(attack, **settings):
    """Return the end of a run with two workers, which an attacker with the token attacks and which then goes on."""
    is_over = threading.Event()
    after = []

    def is_enough(seen):
        if is_over.is_set() and not after:
            after.append(seen.updates)
        return bool(after) and seen.updates >= after[0] + 10

    failures = []

    def run(job):
        try:
            job.await_training()
            with attacker() as client:
                attack(lambda: client.connect(job.address))
        except BaseException as error:
            failures.append(error)
        finally:
            is_over.set()

    settings = {"protocol": "asp", "stop": FOREVER, "callbacks": [EndWhen(is_enough)], **settings}
    slow = pl.Cluster(2, timing=pl.timing.Deterministic(0.01))
    with ranks(3, tiny_job(), {"encrypt": False, "slowness": slow}, **settings) as job:
        job.start_workers()
        attacking = threading.Thread(target=run, args=(job,), daemon=True)
        attacking.start()
        end = job.serve()
        attacking.join(LIMIT_S)
    assert not failures, failures
    return end


def attacker():
    return transport(security(encrypt=False), "tests")


def test_messages_that_are_not_valid_end_their_connection_and_nothing_else(caplog):
    def attack(connect):
        before_mb = memory_mb()
        for name, content in BYTES.items():
            connection = connect()
            send_raw(connection, content)
            assert is_ended(connection), name
        assert memory_mb() - before_mb < 10.0

    end = attacked(attack)
    assert lost(end) == []
    assert "Traceback" not in caplog.text


@parametrize_few("worker", [99, -1, 2**40], keep=1)
def test_a_worker_that_does_not_exist_is_rejected(worker, hello, caplog):
    def attack(connect):
        connection = connect()
        connection.send(msgspec.structs.replace(hello[0], worker=worker))
        assert f"there is no worker {worker}, only" in connection.recv(LIMIT_S).reason

    assert lost(attacked(attack)) == []


def test_a_greeting_of_60_mb_is_answered_in_short(hello):
    def attack(connect):
        connection = connect()
        connection.send(Hello.of("attacker", 0, {"seed": "x" * 60_000_000}))
        assert len(connection.recv(LIMIT_S).reason) < 20_000

    assert lost(attacked(attack)) == []


def test_a_greeting_of_many_small_values_takes_no_more_memory_than_four_times_its_bytes():
    count = 3_000_000
    settings = b"\x81\xa4deep\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    greeting = b"\x94\xa5Hello\xa1a\x00\xc6" + len(settings).to_bytes(4, "big") + settings
    tracemalloc.start()
    try:
        reason = why_rejected(messages.decode(greeting), {"seed": 1}, 3)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(greeting)
    finally:
        tracemalloc.stop()
    assert f"settings of {count + 11} bytes, those of rank 0 have 7" in reason


def test_a_large_message_ends_the_connection(hello):
    def attack(connect):
        connection = connect()
        connection.send(hello[0])
        assert isinstance(connection.recv(LIMIT_S), Accepted)
        send_raw(connection, packed("EvaluationResult", 1, b"x" * MOST_OF_PEER_BYTES))
        assert is_ended(connection)

    assert "bytes, expected at most 4198400" in lost(attacked(attack))[-1][1]


UNASKED = {
    "a gradient": task_messages.RemoteTaskDone(
        draw=999,
        busy_s=0.1,
        measured=Measured(loss=1.0, samples=8, squared_norm=1.0, variance=1.0, finite=True, compute_s=0.1),
    ),
    "a cancelled task": task_messages.RemoteTaskCancelled(999),
    "an evaluation": task_messages.EvaluationResult.of(1, {"loss": 0.0}),
}


@parametrize_few("kind", UNASKED, keep=1)
def test_a_worker_that_answers_what_it_was_not_asked_is_lost(kind, hello):
    """It takes the number of worker 0, whose own process loses its connection."""

    def attack(connect):
        connection = connect()
        connection.send(hello[0])
        assert isinstance(connection.recv(LIMIT_S), Accepted)
        connection.send(UNASKED[kind])
        assert is_ended(connection)

    end = attacked(attack)
    assert [worker for worker, _ in lost(end)] == [hello[0].worker] * 2
    assert [reason.split()[0] for _, reason in lost(end)] == ["replaced", "it"]


BUCKETS = {
    "no frame": (b"\xff" * 100, b""),
    "half a frame": (b"\0", b""),
    "another size": (TENSOR.pack(0, 2) + b"ab", b""),
    "no such bucket": (TENSOR.pack(10**6, 2) + b"ab", b""),
    "more than there is": (TENSOR.pack(0, 2**63) + b"ab", b""),
    "a large one of another size": (b"", TENSOR.pack(0, 2**40)),
    "a large one that does not exist": (b"", TENSOR.pack(10**6, 10)),
}


@parametrize_few("kind", BUCKETS, keep=1)
def test_buckets_that_do_not_fit_their_memory_end_the_connection(kind, hello, caplog):
    def attack(connect):
        connection = connect()
        connection.send(hello[0])
        assert isinstance(connection.recv(LIMIT_S), Accepted)
        small, large = BUCKETS[kind]
        send_raw(connection, packed("GradientStarted", 1, 0.1, buckets=small, tensors=bool(large)))
        connection._data.send([memoryview(large)] if large else [])
        assert is_ended(connection)

    assert [worker for worker, _ in lost(attacked(attack))] == [hello[0].worker] * 2
    assert "Traceback" not in caplog.text


def test_a_worker_sends_no_state(hello):
    def attack(connect):
        connection = connect()
        connection.send(hello[0])
        assert isinstance(connection.recv(LIMIT_S), Accepted)
        send_raw(connection, state("uint8", [10]))
        assert is_ended(connection)

    assert "none that its sender may send" in lost(attacked(attack))[-1][1]


@parametrize_few(
    "kind", [Accepted(1), messages.ShardListens(1), messages.Shutdown(1), task_messages.CancelTask(1)], keep=1
)
def test_a_worker_sends_no_message_of_a_server(kind, hello):
    def attack(connect):
        connection = connect()
        connection.send(hello[0])
        assert isinstance(connection.recv(LIMIT_S), Accepted)
        connection.send(kind)
        assert is_ended(connection)

    assert "none that its sender may send" in lost(attacked(attack))[-1][1]


# --- memory --------------------------------------------------------------------------------------------------------


def raw_sockets(server, protection):
    """Return both sockets of an authenticated connection, which nothing reads."""
    with transport(protection) as client:
        preamble = Preamble.of("1", "")
        control = client._handshake(server.address, protection, preamble, time.monotonic() + LIMIT_S)
        data = client._handshake(
            server.address, protection, preamble._replace(is_control=False), time.monotonic() + LIMIT_S
        )
    control.settimeout(0.3)
    return control, data


def send_without_end(sock, content):
    while True:
        sock.sendall(content)


def test_a_process_that_reads_no_answers_has_to_wait(monkeypatch):
    """It sends heartbeats without end; the answers take no memory without bound."""
    monkeypatch.setattr(transport_module, "BUFFER_BYTES", 1 << 14)
    protection = security(encrypt=False)
    with serving(protection) as server:
        control, data = raw_sockets(server, protection)
        wait_until(lambda: server.connections)
        before_mb = memory_mb()
        with control, data, pytest.raises(TimeoutError):
            send_without_end(control, packed("Heartbeat") * 1000)
        assert server.connections[0]._control.unsent < 10 * MAX_WAITING
        assert memory_mb() - before_mb < 20.0


def test_large_messages_that_wait_for_a_tensor_keep_their_sender_waiting(monkeypatch):
    monkeypatch.setattr(transport_module, "BUFFER_BYTES", 1 << 14)
    protection = security(encrypt=False)
    with serving(protection) as server:
        control, data = raw_sockets(server, protection)
        wait_until(lambda: server.connections)
        before_mb = memory_mb()
        with control, data, pytest.raises(TimeoutError):
            control.sendall(packed("Leave", "x" * 250_000, tensors=1) * MAX_WAITING)
        assert memory_mb() - before_mb < 40.0


def test_a_size_that_is_only_claimed_takes_no_memory():
    protection = security(encrypt=False)
    with serving(protection) as server:
        before_mb = memory_mb()
        sockets = [each for _ in range(50) for each in raw_sockets(server, protection)]
        for sock in sockets[::2]:
            sock.sendall(MESSAGE.pack(60_000_000, 0, 0) + bytes(1000))
        wait_until(lambda: len(server.connections) == 50)
        with transport(protection) as client:
            client.connect(server.address).send(task_messages.CancelTask(1))
            wait_until(lambda: len(server.connections) == 51)
            server.connections[-1].recv(LIMIT_S)
        assert memory_mb() - before_mb < 50 * 0.3
        for sock in sockets:
            sock.close()
