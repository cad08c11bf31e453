"""One suite for connections in memory, over TCP, and over TCP with TLS 1.3."""

import queue
import threading
from contextlib import ExitStack, closing

import pytest
import torch

from connected_sides import KINDS
from machine_speed import scaled
from paceline.core.events import Measured
from paceline.engines.distributed.transport import connection as connection_module
from paceline.engines.distributed.transport.connection import CLOSED, Connection, ConnectionLost
from paceline.engines.distributed.transport.encoded import encoded
from paceline.engines.distributed.transport.messages import End, Leave, RequestShardState, ShardState
from paceline.engines.distributed.transport.task_messages import (
    CancelTask,
    EvaluationResult,
    Heartbeat,
    HeartbeatAnswer,
    RemoteTask,
    RemoteTaskDone,
    UpdateDone,
)

LIMIT_S = scaled(20)
SILENCE_S = scaled(0.3)  # of a side that counts as lost
WORK = RemoteTask(draw=1, version=7, sends_version=True, run_s=0.5)
FINISHED = RemoteTaskDone(
    draw=1,
    busy_s=0.1,
    measured=Measured(loss=0.5, samples=1, squared_norm=1.0, variance=0.0, finite=True, compute_s=0.1),
)
LARGE = 3_000_000  # elements; more than sockets buffer
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64]


@pytest.fixture(params=list(KINDS))
def connect(request):
    """Return a function that connects a server and a worker with a timeout for heartbeats."""
    with ExitStack() as opened:
        yield lambda timeout_s=60.0: opened.enter_context(KINDS[request.param](heartbeat_timeout_s=timeout_s))


@pytest.fixture
def sides(connect):
    return connect()


class Listener:
    """Receiver of callbacks, which come from one thread."""

    def __init__(self, connection):
        self.messages = queue.SimpleQueue()
        self.reasons = queue.SimpleQueue()
        self.threads = set()
        connection.listen(self.on_message, self.on_end)

    def on_message(self, message, at_s, contents_s):
        self.threads.add(threading.current_thread().name)
        assert contents_s >= 0
        self.messages.put(message)

    def on_end(self, reason):
        self.threads.add(threading.current_thread().name)
        self.reasons.put(reason)

    def next(self):
        return self.messages.get(timeout=LIMIT_S)

    def end(self):
        return self.reasons.get(timeout=LIMIT_S)


def numbers(*sizes):
    """Return vectors of these sizes, each with other numbers."""
    return [torch.arange(size, dtype=torch.float32) + place for place, size in enumerate(sizes)]


# --- order ------------------------------------------------------------------------------------------------------------


def test_messages_of_both_sides_arrive_in_order(sides):
    for sender, receiver in (sides, reversed(sides)):
        for version in range(500):
            sender.send(UpdateDone(version))
        assert [receiver.recv(LIMIT_S).version for _ in range(500)] == list(range(500))


@pytest.mark.parametrize("size", [1, 100, LARGE])
def test_a_message_is_delivered_when_its_buckets_have_arrived(sides, size):
    server, worker = sides
    sent, received = numbers(size, size), [torch.zeros(size), torch.zeros(size)]
    server.post_buckets(received)
    worker.send_bucket(1, sent[1])
    worker.send(FINISHED, [(0, sent[0])])
    worker.send(Leave("SIGTERM"))
    assert server.recv(LIMIT_S) == FINISHED
    assert all(map(torch.equal, received, sent))
    assert server.recv(LIMIT_S) == Leave("SIGTERM")


def test_buckets_wait_for_memory_and_a_cancellation_overtakes_them(sides):
    server, worker = sides
    [version] = numbers(LARGE)
    server.send(WORK, [(0, version)])
    server.send(CancelTask(1))
    assert worker.recv(LIMIT_S) == CancelTask(1)
    received = torch.zeros(LARGE)
    worker.post_buckets([received])
    assert worker.recv(LIMIT_S) == WORK
    assert torch.equal(received, version)


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_bucket_that_is_sent_twice_has_its_last_contents(sides, size):
    server, worker = sides
    received = [torch.zeros(size), torch.zeros(10)]
    server.post_buckets(received)
    worker.send_bucket(0, torch.ones(size))
    worker.send(FINISHED, [(1, torch.ones(10)), (0, torch.full([size], 2.0))])
    assert server.recv(LIMIT_S) == FINISHED
    assert received[0].eq(2).all()
    assert received[1].eq(1).all()


def test_both_directions_carry_buckets_at_once(sides):
    received = [torch.zeros(LARGE), torch.zeros(LARGE)]
    sent = numbers(LARGE, LARGE)
    for side, memory in zip(sides, received, strict=True):
        side.post_buckets([memory])
    for _ in range(3):
        sides[0].send(WORK, [(0, sent[1])])
        sides[1].send(FINISHED, [(0, sent[0])])
        assert sides[1].recv(LIMIT_S) == WORK
        assert sides[0].recv(LIMIT_S) == FINISHED
    assert all(map(torch.equal, received, sent))


def test_an_empty_bucket(sides):
    server, worker = sides
    server.post_buckets([torch.zeros(0), torch.zeros(5)])
    worker.send(FINISHED, [(0, torch.zeros(0)), (1, torch.ones(5))])
    worker.send_bucket(0, torch.zeros(0))
    worker.send(UpdateDone(1))
    assert server.recv(LIMIT_S) == FINISHED
    assert server.recv(LIMIT_S) == UpdateDone(1)


def test_a_state_arrives_with_tensors_of_all_types(sides):
    server, worker = sides
    tensors = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.zeros(0, 4), "number": torch.tensor(7.0), "large": numbers(LARGE)[0]}
    worker.send(ShardState("{}", "model", tensors=tensors))
    worker.send(RequestShardState("state"))
    arrived = server.recv(LIMIT_S)
    assert arrived.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert arrived.tensors[name].dtype == tensor.dtype
        assert torch.equal(arrived.tensors[name], tensor)
    assert server.recv(LIMIT_S) == RequestShardState("state")


def test_a_long_message(sides):
    server, worker = sides
    metrics = {f"metric {i}": float(i) for i in range(10_000)}
    worker.send(EvaluationResult.of(3, metrics))
    worker.send(UpdateDone(1))
    assert server.recv(LIMIT_S).decoded({3}) == metrics
    assert server.recv(LIMIT_S) == UpdateDone(1)


def test_many_threads_send(sides):
    server, worker = sides
    listener = Listener(server)
    server.post_buckets([torch.zeros(1000)])

    def send(thread):
        for number in range(50):
            worker.send(
                RemoteTask(draw=number, version=thread, sends_version=False, run_s=0.0),
                [(0, torch.full([1000], float(thread)))],
            )

    threads = [threading.Thread(target=send, args=[thread]) for thread in range(4)]
    for each in threads:
        each.start()
    arrived = [listener.next() for _ in range(200)]
    for each in threads:
        each.join()
    for thread in range(4):
        assert [task.draw for task in arrived if task.version == thread] == list(range(50))


# --- callbacks --------------------------------------------------------------------------------------------------------


def test_callbacks_come_from_one_thread_and_begin_with_what_has_arrived_before(sides):
    server, worker = sides
    worker.send(UpdateDone(1))
    worker.send(UpdateDone(2))
    assert server.recv(LIMIT_S) == UpdateDone(1)
    listener = Listener(server)
    worker.send(UpdateDone(3))
    assert [listener.next().version for _ in range(2)] == [2, 3]
    worker.close()
    assert listener.end()
    assert listener.threads == {"paceline-sockets"}


def test_an_error_in_a_callback_is_logged_and_ends_no_other_connection(sides, caplog):
    server, worker = sides
    arrived = queue.SimpleQueue()

    def on_message(message, at_s, contents_s):
        if message.version == 1:
            raise RuntimeError("a mistake")
        arrived.put(message)

    server.listen(on_message, lambda reason: None)
    worker.send(UpdateDone(1))
    worker.send(UpdateDone(2))
    assert arrived.get(timeout=LIMIT_S) == UpdateDone(2)
    assert "a mistake" in caplog.text


# --- the end ----------------------------------------------------------------------------------------------------------


def test_what_was_sent_before_the_end_is_delivered_and_then_the_end_once(sides):
    server, worker = sides
    received = torch.zeros(1000)
    server.post_buckets([received])
    worker.send(FINISHED, [(0, torch.ones(1000))])
    assert server.recv(LIMIT_S) == FINISHED  # so that nothing is under way when the worker closes
    listener = Listener(server)
    worker.close()
    assert listener.end()
    assert listener.messages.empty()
    with pytest.raises(queue.Empty):
        listener.reasons.get(timeout=0.05)


def test_an_end_is_raised_by_every_recv(sides):
    server, worker = sides
    worker.close()
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            server.recv(LIMIT_S)
    with pytest.raises(ConnectionLost, match=CLOSED):
        worker.recv(LIMIT_S)


def test_to_send_and_to_close_after_the_end_does_nothing(sides):
    server, worker = sides
    worker.close()
    with pytest.raises(ConnectionLost):
        server.recv(LIMIT_S)
    server.send(WORK, [(0, torch.zeros(LARGE))])
    server.send_bucket(0, torch.zeros(3))
    server.close()


def test_no_message_within_a_timeout(sides):
    with pytest.raises(ConnectionLost, match=r"no message came within 0\.01 s"):
        sides[0].recv(0.01)


def test_a_message_whose_bucket_never_comes_is_not_delivered(sides):
    server, worker = sides
    worker.send(FINISHED, [(0, torch.zeros(LARGE))])  # the server has posted no memory
    worker.send(Heartbeat())
    worker.close()
    with pytest.raises(ConnectionLost):
        server.recv(LIMIT_S)


# --- invalid data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 100, 3 * LARGE])
def test_a_bucket_of_another_size_than_its_memory_ends_the_connection(sides, size):
    server, worker = sides
    received = torch.zeros(50)
    server.post_buckets([received])
    worker.send(FINISHED, [(0, torch.ones(1).expand(size).contiguous())])
    with pytest.raises(ConnectionLost, match="bytes, but 200 were expected"):
        server.recv(LIMIT_S)
    assert received.eq(0).all()


@pytest.mark.parametrize("size", [1, LARGE])
def test_an_unknown_bucket_ends_the_connection(sides, size):
    server, worker = sides
    server.post_buckets([torch.zeros(size)])
    worker.send(FINISHED, [(3, torch.ones(size))])
    with pytest.raises(ConnectionLost, match="no bucket 3"):
        server.recv(LIMIT_S)


@pytest.mark.parametrize("dtype", ["float33", "save", "__class__", "nn"])
def test_an_announced_tensor_of_no_type_ends_the_connection(sides, dtype, monkeypatch):
    server, worker = sides
    _announce(worker, (dtype, [3]), monkeypatch)
    with pytest.raises(ConnectionLost, match="invalid"):
        server.recv(LIMIT_S)


@pytest.mark.parametrize("shape", [[-1], [1 << 60, 1 << 60], [1 << 41]])
def test_an_announced_tensor_of_no_shape_ends_the_connection(sides, shape, monkeypatch):
    server, worker = sides
    _announce(worker, ("float32", shape), monkeypatch)
    with pytest.raises(ConnectionLost, match="invalid"):
        server.recv(LIMIT_S)


def _announce(sender, described, monkeypatch):
    """Send a state whose tensor is only announced."""
    content = encoded(End("updates", "", described=encoded({"final": described})))
    monkeypatch.setattr(connection_module.messages, "encode", lambda message: (content, []))
    sender.send(End("updates", ""))


# --- heartbeats -------------------------------------------------------------------------------------------------------


def test_idle_sides_answer_each_other(connect):
    server, worker = connect(timeout_s=SILENCE_S)
    ends = [Listener(side) for side in (server, worker)]
    answered = threading.Event()
    count = 0
    answer = Connection._answer_heartbeat

    def counted(self, arrived):
        nonlocal count
        was_heartbeat = answer(self, arrived)
        count += was_heartbeat
        if count > 8:
            answered.set()
        return was_heartbeat

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "_answer_heartbeat", counted)
        assert answered.wait(LIMIT_S)
    assert all(end.reasons.empty() and end.messages.empty() for end in ends)


def test_a_side_whose_main_thread_does_not_answer_is_lost(connect):
    server, worker = connect(timeout_s=SILENCE_S)
    worker.answers_heartbeats = False
    listener = Listener(server)
    hung = Listener(worker)
    assert listener.end() == f"silent for {SILENCE_S:g} s"
    assert isinstance(hung.next(), Heartbeat)


def test_a_side_whose_main_thread_answers_is_not_lost(connect):
    server, worker = connect(timeout_s=SILENCE_S)
    worker.answers_heartbeats = False
    listener = Listener(server)
    asked = Listener(worker)
    for _ in range(6):
        assert isinstance(asked.next(), Heartbeat)
        worker.send(HeartbeatAnswer())
    assert listener.reasons.empty()
    assert listener.messages.empty()


def test_nothing_is_left_of_a_connection(connect):
    server, worker = connect()
    with closing(worker):
        server.close()
        with pytest.raises(ConnectionLost):
            worker.recv(LIMIT_S)
    for side in (server, worker):
        with pytest.raises(ConnectionLost):
            side.recv(LIMIT_S)
        assert [stream._sock.fileno() for stream in (side._control, side._data)] == [-1, -1]
