"""Stream: partial writes and reads at any byte, the order of parts, and the end."""

import queue
import socket
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machine_speed import scaled
from paceline.engines.distributed.transport.socket_loop import SocketLoop
from paceline.engines.distributed.transport.stream import (
    FIRST_BYTES,
    JOINED_BYTES,
    LOW_WATER_BYTES,
    RECORD_BYTES,
    Stream,
)
from paceline.recording.metrics.network_counters import NetworkCounters
from this_process import wait_until

LIMIT_S = scaled(20)
PIECE = 1 << 12


class Received:
    """Reader that takes bytes in pieces of a size, none after a number of bytes, and expects so many in all."""

    def __init__(self, size, most=1 << 62, in_all=0):
        self.calls = 0
        self._in_all = in_all
        self.content = bytearray()
        self.ends = queue.SimpleQueue()
        self.most = most
        self._memory = memoryview(bytearray(size))

    def next_buffer(self):
        return None if len(self.content) >= self.most else self._memory

    def bytes_to_come(self):
        return max(1, self._in_all - len(self.content))

    def on_bytes(self, count):
        self.calls += 1
        self.content += self._memory[:count]

    def on_end(self, reason):
        self.ends.put(reason)


class PartialSocket:
    """Socket that takes at most so many bytes in each call, in turn, and blocks where the number is 0.

    Args:
        sock: the socket.
        limits: numbers of bytes.
        least: smallest number, except 0.
    """

    def __init__(self, sock, limits, least):
        self._sock = sock
        self._limits = [limit and max(limit, least) for limit in limits]
        self._calls = 0

    def __getattr__(self, name):
        return getattr(self._sock, name)

    def send(self, content):
        self._calls += 1
        limit = self._limits[self._calls % len(self._limits)]
        if not limit:
            raise BlockingIOError
        return self._sock.send(content[:limit])


@pytest.fixture(scope="module")
def loop():
    with closing(SocketLoop()) as loop:
        yield loop


def in_loop(loop, function):
    """Call a function in the thread of the loop, and wait for it."""
    done = queue.SimpleQueue()
    loop.call(lambda: done.put(function()))
    return done.get(timeout=LIMIT_S)


LIMITS = st.lists(st.integers(1, 40_000), min_size=1, max_size=4).flatmap(lambda found: st.permutations([*found, 0]))
SIZES = st.lists(st.one_of(st.integers(0, 100), st.integers(0, 3 * JOINED_BYTES)), min_size=1, max_size=8)


@settings(max_examples=20)
@given(sizes=SIZES, limits=LIMITS, read_bytes=st.integers(1, 70_000))
def test_parts_arrive_in_order_wherever_the_operating_system_divides_them(loop, sizes, limits, read_bytes):
    ours, theirs = socket.socketpair()
    sent = [bytes([number % 251 + 1]) * size for number, size in enumerate(sizes)]
    least = sum(sizes) // 20 + 1  # so that there are few calls
    received = Received(max(read_bytes, least))
    counters = NetworkCounters()
    sender = Stream(loop, PartialSocket(ours, limits, least), Received(1), counters)
    receiver = Stream(loop, theirs, received, counters)
    receiver.resume()
    for each in sent:
        sender.send([memoryview(each)] if each else [])
    wait_until(lambda: not sender.is_sending)
    in_loop(loop, lambda: sender.end("done"))
    assert received.ends.get(timeout=LIMIT_S) == "the other process has closed the connection"
    assert received.content == b"".join(sent)
    assert counters.sent_bytes == counters.received_bytes == sum(sizes)


def test_a_full_socket_takes_no_copy_and_its_end_frees_the_memory(loop):
    ours, theirs = socket.socketpair()
    reader = Received(1)
    stream = Stream(loop, ours, reader, NetworkCounters())
    content = bytearray(8 << 20)
    with memoryview(content) as part:
        stream.send([part])
        assert stream.is_sending
        assert stream.unsent == 1
        in_loop(loop, lambda: stream.end("enough"))
    del part
    assert not stream.is_sending
    content.clear()  # a view that is still exported would raise BufferError
    in_loop(loop, lambda: stream.end("again"))
    assert [reader.ends.get_nowait() for _ in range(reader.ends.qsize())] == ["enough"]
    theirs.close()


def test_the_thread_of_the_sender_writes_the_first_bytes_and_the_loop_the_rest(loop):
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * FIRST_BYTES)
    stream = Stream(loop, ours, Received(1), NetworkCounters())
    in_loop_now = queue.SimpleQueue()
    go_on = queue.SimpleQueue()
    loop.call(lambda: (in_loop_now.put(None), go_on.get(timeout=LIMIT_S)))
    in_loop_now.get(timeout=LIMIT_S)
    stream.send([memoryview(b"a message")])  # while the loop is busy
    assert theirs.recv(100) == b"a message"
    assert not stream.is_sending
    go_on.put(None)
    in_loop(loop, lambda: stream.end(""))
    theirs.close()


def test_a_reader_without_memory_reads_nothing_until_it_resumes(loop):
    ours, theirs = socket.socketpair()
    reader = Received(5, most=5)
    stream = Stream(loop, ours, reader, NetworkCounters())
    stream.resume()
    theirs.sendall(b"0123456789")
    theirs.close()
    wait_until(lambda: reader.content == b"01234")
    assert reader.ends.empty()  # the end comes after the bytes
    reader.most = 1 << 62
    stream.resume()
    assert reader.ends.get(timeout=LIMIT_S) == "the other process has closed the connection"
    assert reader.content == b"0123456789"


@pytest.mark.parametrize("missing", [1, RECORD_BYTES])
def test_the_pieces_of_a_tensor_wake_the_thread_only_when_many_bytes_have_come_or_the_last_ones(loop, missing):
    nbytes = LOW_WATER_BYTES + RECORD_BYTES
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sender:
        sock, _ = listener.accept()
        received = Received(nbytes, in_all=nbytes)
        stream = Stream(loop, sock, received, NetworkCounters())
        stream.resume()
        in_loop(loop, lambda: None)
        content = bytes(range(256)) * (nbytes // 256)
        for start in range(0, nbytes - missing, PIECE):
            sender.sendall(content[start : min(start + PIECE, nbytes - missing)])
        sender.sendall(content[nbytes - missing :])
        wait_until(lambda: len(received.content) == nbytes)
        assert received.content == content
        assert received.calls <= 3 + RECORD_BYTES // PIECE  # the end is read as it comes
        in_loop(loop, lambda: stream.end("the end"))
