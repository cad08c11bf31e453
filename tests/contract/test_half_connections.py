"""A connection whose other side is a raw socket: closed at any byte, garbage, silence, and a slow reader."""

import queue
import socket
from contextlib import suppress
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connected_sides import SOON_S, Listening, buffers, filled, raw_peer, tcp_pair
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.messages import InitShard
from paceline.engines.distributed.transport.readers import MAX_MESSAGE_BYTES, MESSAGE, SMALL_BYTES, STATE, TENSOR
from paceline.engines.distributed.transport.task_messages import (
    CancelTask,
    GradientStarted,
    Heartbeat,
    HeartbeatAnswer,
    ReleaseVersion,
    RemoteTask,
)
from selections import parametrize_few

TASK = RemoteTask(draw=1, version=7, sends_version=True, run_s=0.5)
SIZE = 9_000  # bytes of a bucket that is sent over the data socket
STATE_TENSOR = torch.arange(50, dtype=torch.int64)
PAIRS = {"memory": socket.socketpair, "tcp": tcp_pair}


def message(sent, tensors=0, buckets=b""):
    content, _ = messages.encode(sent)
    return MESSAGE.pack(len(content), len(buckets), tensors) + content + buckets


def tensor(number, content):
    return TENSOR.pack(number, len(content)) + content


BUCKET = bytes(filled(SIZE, 1).tolist())
DATA = [tensor(0, BUCKET), tensor(1, BUCKET), tensor(STATE, STATE_TENSOR.numpy().tobytes())]
SMALL = tensor(2, b"small")
CONTROL = [  # messages, each with the number of tensors before it, and the small buckets with it
    (GradientStarted(1, 0.0), 0, b""),
    (TASK, 2, b""),
    (ReleaseVersion(3), 2, SMALL),
    (InitShard("{}", 3, tensors={"numbers": STATE_TENSOR}), 3, b""),
    (ReleaseVersion(4), 3, b""),
]
CONTROL_BYTES = [message(*each) for each in CONTROL]
CONTROL_STOPS = list(accumulate(map(len, CONTROL_BYTES)))
DATA_STOPS = list(accumulate(map(len, DATA)))


def complete(control_cut, data_cut):
    """Return how many messages are complete of these bytes."""
    tensors = sum(stop <= data_cut for stop in DATA_STOPS)
    count = 0
    for stop, (_, needed, _) in zip(CONTROL_STOPS, CONTROL, strict=True):
        if stop > control_cut or needed > tensors:
            return count
        count += 1
    return count


@parametrize_few("pair", PAIRS, keep=1)
@settings(max_examples=60)
@given(
    control_cut=st.integers(0, CONTROL_STOPS[-1]),
    data_cut=st.integers(0, DATA_STOPS[-1]),
    pieces=st.lists(st.integers(1, 5_000), max_size=3),
)
def test_what_was_sent_before_the_end_is_delivered_wherever_it_ends(pair, control_cut, data_cut, pieces):
    with pytest.MonkeyPatch.context() as patch, raw_peer(PAIRS[pair]) as (connection, control, data):
        patch.setattr("paceline.engines.distributed.transport.connection.CLOSING_S", 0.2)
        connection.post_buckets(buffers(SIZE, SIZE, 5))
        listening = Listening(connection)
        sent = b"".join(DATA)[:data_cut]
        for piece in pieces:
            data.sendall(sent[:piece])
            sent = sent[piece:]
            listening.flush()
        data.sendall(sent)
        control.sendall(b"".join(CONTROL_BYTES)[:control_cut])
        for sock in (control, data):
            sock.close()
        assert "closed" in listening.end()
        arrived = listening.rest()
        expected = [each for each, _, _ in CONTROL][: complete(control_cut, data_cut)]
        assert [type(each) for each in arrived] == [type(each) for each in expected]
        assert [each for each in arrived if not isinstance(each, InitShard)] == [
            each for each in expected if not isinstance(each, InitShard)
        ]
        assert all(torch.equal(each.tensors["numbers"], STATE_TENSOR) for each in arrived if hasattr(each, "tensors"))


@settings(max_examples=60)
@given(control_bytes=st.binary(max_size=200), data_bytes=st.binary(max_size=200))
def test_garbage_ends_the_connection_once_and_delivers_nothing(control_bytes, data_bytes):
    with raw_peer() as (connection, control, data):
        connection.post_buckets(buffers(SIZE))
        listening = Listening(connection)
        with suppress(OSError):  # the connection has ended after the first bytes
            control.sendall(control_bytes)
            data.sendall(data_bytes)
        for sock in (control, data):
            sock.close()
        assert listening.end()
        assert listening.rest() == []


@pytest.mark.parametrize(
    ("control_bytes", "reason"),
    [
        (MESSAGE.pack(MAX_MESSAGE_BYTES + 1, 0, 0), f"invalid message: {MAX_MESSAGE_BYTES + 1} bytes"),
        (MESSAGE.pack(0, 0, 0), "invalid message: 0 bytes"),
        (MESSAGE.pack(1, SMALL_BYTES + 1, 0), "invalid message: 1 bytes"),
        (MESSAGE.pack(3, 0, 0) + b"abc", "invalid message: "),
        (message(TASK, 0, tensor(0, b"abc")[:-1]), "invalid bucket: 2 bytes, but 3 were expected"),
        (message(TASK, 0, b"abc"), "invalid bucket: incomplete frame"),
        (message(TASK, 0, tensor(STATE, b"abc")), f"invalid bucket: no bucket {STATE}"),
        (message(InitShard("", 1, tensors={"a": torch.zeros(2)})).replace(b"float32", b"nothing"), "invalid tensors"),
    ],
)
def test_an_invalid_message_ends_the_connection(control_bytes, reason):
    with raw_peer() as (connection, control, _):
        connection.post_buckets(buffers(3))
        listening = Listening(connection)
        control.sendall(control_bytes)
        assert reason in listening.end()
        assert listening.rest() == []
        assert control.recv(1) == b""


def test_a_silent_process_counts_as_lost():
    with raw_peer(heartbeat_timeout_s=0.12) as (connection, control, _):
        listening = Listening(connection)
        assert listening.end() == "silent for 0.12 s"
        assert control.recv(1 << 12).startswith(message(Heartbeat()))


def test_interrupts_and_heartbeats_overtake_tensors():
    with raw_peer() as (connection, control, data):
        connection.post_buckets(buffers(SIZE))
        listening = Listening(connection)
        data.sendall(DATA[0][:-1])
        control.sendall(message(TASK, 1) + message(CancelTask(1)) + message(Heartbeat()))
        assert listening.next() == [CancelTask(1)]
        assert control.recv(1 << 12) == message(HeartbeatAnswer())
        assert listening.arrived.empty()
        data.sendall(DATA[0][-1:])
        assert listening.next() == [TASK]


def test_a_transfer_of_five_timeouts_is_not_taken_for_death():
    timeout_s = 0.12
    with raw_peer(heartbeat_timeout_s=timeout_s) as (connection, control, data):
        listening = Listening(connection)
        heartbeat = message(Heartbeat())
        connection.send_bucket(0, filled(3_000_000, 1))
        for _ in range(5 * 3):  # a heartbeat comes after at least a third of the timeout
            assert control.recv(len(heartbeat), socket.MSG_WAITALL) == heartbeat
            data.recv(1 << 10)
            control.sendall(message(HeartbeatAnswer()))
        assert listening.ends.empty()
        assert connection._data.is_sending


def test_a_tensor_that_still_comes_after_the_end_of_the_control_socket_is_received():
    """As over a slow link, when the other process has sent all and has ended."""
    size = 400
    with pytest.MonkeyPatch.context() as patch, raw_peer() as (connection, control, data):
        connection.post_buckets(buffers(size))
        listening = Listening(connection)
        listening.flush()
        checks = queue.SimpleQueue()
        patch.setattr(connection._loop, "call_later", lambda delay_s, check: checks.put(check))
        control.sendall(message(TASK, 1))
        control.close()
        check = checks.get(timeout=SOON_S)
        content = tensor(0, bytes(filled(size, 1).tolist()))
        for start in range(0, len(content), 100):
            data.sendall(content[start : start + 100])
            listening.flush()
            assert listening.ends.empty()
            connection._loop.call(check)
            check = checks.get(timeout=SOON_S)
        assert listening.next() == [TASK]
        connection._loop.call(check)  # without a byte since the one before
        assert "closed" in listening.end()


def test_a_fast_sender_of_messages_waits_for_a_slow_receiver():
    with raw_peer() as (_, control, _):
        control.setblocking(False)
        sent = message(ReleaseVersion(3)) * 100
        queued = 0
        with suppress(BlockingIOError):
            while queued < 1 << 26:  # nothing is received: `listen` is not called, and `recv` is not either
                queued += control.send(sent)
        assert queued < 1 << 23
