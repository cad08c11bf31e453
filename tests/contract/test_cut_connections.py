"""Connections whose other side ends at any byte, sends garbage, or does not read."""

import os
import queue
import socket
from contextlib import closing, contextmanager, suppress
from functools import cache

import psutil
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.messages import Hello, Leave, ShardState
from paceline.engines.distributed.transport.socket_loop import SocketLoop
from paceline.engines.distributed.transport.task_messages import CancelTask, RemoteTask, UpdateDone

LIMIT_S = 20
SIZES = (7, 3000)  # elements of each bucket: one that is small, and one that is not


@pytest.fixture(scope="module", autouse=True)
def loop():
    """The thread of the sockets of this module."""
    with closing(SocketLoop()) as loop:
        LOOPS.append(loop)
        yield
        LOOPS.clear()


LOOPS = []


class Received:
    """A connection, what arrives over it, and the sockets of the other side."""

    def __init__(self):
        (ours, self.control), (our_data, self.data) = socket.socketpair(), socket.socketpair()
        self.buffers = [torch.zeros(size) for size in SIZES]
        self.messages = []
        self.ends = queue.SimpleQueue()
        self.connection = Connection(LOOPS[0], ours, our_data, 60.0)
        self.connection.post_buckets(self.buffers)
        self.connection.listen(lambda message, at_s, contents_s: self.messages.append(message), self.ends.put)

    def close_other_side(self):
        self.control.close()
        self.data.close()

    def end(self):
        reason = self.ends.get(timeout=LIMIT_S)
        assert self.ends.empty()
        return reason


@contextmanager
def received():
    each = Received()
    try:
        yield each
    finally:
        each.close_other_side()
        each.connection.close()


def messages():
    """Yield messages with their buckets: small and large ones, several together, states."""
    yield UpdateDone(1), []
    yield RemoteTask(1, 1, True, 0.0), [(0, torch.full([SIZES[0]], 1.0))]
    yield RemoteTask(2, 2, True, 0.0), [(1, torch.full([SIZES[1]], 2.0)), (0, torch.full([SIZES[0]], 2.0))]
    yield Leave("x" * 300), []
    yield ShardState("{}", "model", tensors={"a": torch.ones(5), "b": torch.ones(2000), "c": torch.zeros(0)}), []
    yield RemoteTask(3, 3, True, 0.0), [(1, torch.full([SIZES[1]], 3.0))]
    yield UpdateDone(2), []


@cache
def recorded():
    """Return the bytes on both sockets, and after each message how many have been sent on each."""
    (ours, control), (our_data, data) = socket.socketpair(), socket.socketpair()
    control.setblocking(False)
    data.setblocking(False)
    sender = Connection(LOOPS[0], ours, our_data, 60.0)
    sent, ends = (bytearray(), bytearray()), []
    for message, buckets in messages():
        sender.send(message, buckets)
        for sock, content in zip((control, data), sent, strict=True):
            while chunk := _available(sock):
                content += chunk
        ends.append((len(sent[0]), len(sent[1])))
    sender.close()
    control.close()
    data.close()
    return bytes(sent[0]), bytes(sent[1]), ends


def _available(sock):
    try:
        return sock.recv(1 << 20)
    except BlockingIOError:
        return b""


def write(sock, content):
    """Write all, as far as the other side still reads."""
    with suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(content)


@given(st.data())
def test_of_a_connection_that_ends_at_any_byte_all_complete_messages_are_delivered(draw):
    control, data, ends = recorded()
    cut = draw.draw(st.integers(0, len(control))), draw.draw(st.integers(0, len(data)))
    _check_cut(control, data, ends, cut)


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("late", [-1, 0, 1])
def test_of_a_connection_that_ends_beside_the_end_of_a_message(number, late):
    control, data, ends = recorded()
    at = [(0, 0), *ends][number]
    _check_cut(control, data, ends, (max(0, at[0] + late), len(data)))
    _check_cut(control, data, ends, (len(control), max(0, at[1] + late)))


def _check_cut(control, data, ends, cut):
    with received() as receiver:
        write(receiver.control, control[: cut[0]])
        write(receiver.data, data[: cut[1]])
        receiver.close_other_side()
        receiver.end()
        complete = 0
        while complete < len(ends) and ends[complete][0] <= cut[0] and ends[complete][1] <= cut[1]:
            complete += 1
        expected = list(messages())[:complete]
        assert [type(message) for message in receiver.messages] == [type(message) for message, _ in expected]
        assert [message.draw for message in receiver.messages if isinstance(message, RemoteTask)] == [
            message.draw for message, _ in expected if isinstance(message, RemoteTask)
        ]


@given(st.binary(max_size=300), st.binary(max_size=300))
@example(b"\xff" * 100, b"")
@example(b"\x00" * 100, b"\x00" * 100)
@example(b"", b"\xff" * 100)
def test_garbage_ends_the_connection_or_waits_for_more(control, data):
    with received() as receiver:
        write(receiver.control, control)
        write(receiver.data, data)
        receiver.close_other_side()
        receiver.end()
        assert receiver.messages == []


def test_a_sender_to_a_side_that_does_not_read_neither_blocks_nor_copies():
    large = torch.zeros(12_500_000)
    (ours, control), (our_data, data) = socket.socketpair(), socket.socketpair()
    sender = Connection(LOOPS[0], ours, our_data, 60.0)
    before = _resident_bytes()
    for draw in range(20):
        sender.send(RemoteTask(draw, 1, True, 0.0), [(0, large)])
    assert _resident_bytes() < before + large.nbytes / 2
    sender.close()
    control.close()
    data.close()


def test_a_receiver_without_memory_for_buckets_reads_no_more_than_a_little():
    """Of 50 MB that wait, only what the sockets hold is taken from the sender; control messages are still read."""
    (ours, other), (our_data, other_data) = socket.socketpair(), socket.socketpair()
    receiver = Connection(LOOPS[0], ours, our_data, 60.0)
    sender = Connection(LOOPS[0], other, other_data, 60.0)
    before = _resident_bytes()
    large = torch.ones(12_500_000)
    size = _resident_bytes() - before
    sender.send(RemoteTask(1, 1, True, 0.0), [(0, large)])
    sender.send(CancelTask(1))
    assert receiver.recv(LIMIT_S) == CancelTask(1)
    assert _resident_bytes() < before + 1.5 * max(size, large.nbytes)
    for each in (sender, receiver):
        each.close()


def test_a_receiver_that_is_behind_reads_no_more_messages():
    """Messages that nobody takes stay at their sender."""
    (ours, other), (our_data, other_data) = socket.socketpair(), socket.socketpair()
    receiver = Connection(LOOPS[0], ours, our_data, 60.0)
    sender = Connection(LOOPS[0], other, other_data, 60.0)
    long = Hello("x" * 10_000, 0, {})
    for _ in range(5000):
        sender.send(long)
    sender.send(CancelTask(1))
    assert [receiver.recv(LIMIT_S) for _ in range(5000)] == [long] * 5000
    assert receiver._inbox.qsize() <= 1
    for each in (sender, receiver):
        each.close()


def _resident_bytes():
    return psutil.Process(os.getpid()).memory_info().rss
