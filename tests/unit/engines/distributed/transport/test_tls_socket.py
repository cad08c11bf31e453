"""TLS over memory: partial writes, records that the selector does not report, and the end."""

import selectors
import socket
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engines.distributed.transport.tls import TLSSecurity, derive_identity
from paceline.engines.distributed.transport.tls_socket import BATCH_BYTES, FIRST_BYTES


@pytest.fixture(scope="module")
def security():
    return TLSSecurity(derive_identity("a token"))


def connected(security):
    """Return both ends after the handshake, and the sockets below them."""
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
    ends = [security.wrap(sock, is_server=sock is pair[0]) for sock in pair]
    steps = [security.authenticate(end, is_server=end is ends[0]) for end in ends]
    while steps:
        steps = [each for each in steps if next(each, None) is not None]
    return ends, pair


def is_readable(sock):
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(0))


@settings(max_examples=8)
@given(sizes=st.lists(st.integers(1, 2 * BATCH_BYTES), min_size=1, max_size=4), room=st.integers(500, 3 * FIRST_BYTES))
def test_bytes_arrive_in_order_whatever_the_operating_system_takes(security, sizes, room):
    (sender, receiver), _ = connected(security)
    sent = b"".join(bytes([number + 1]) * size for number, size in enumerate(sizes))
    unsent, received, memory = memoryview(sent), bytearray(), memoryview(bytearray(room))
    while len(received) < len(sent):
        with suppress(BlockingIOError):  # the socket is full: the same bytes follow
            unsent = unsent[sender.send(unsent) :]
        try:
            count = receiver.recv_into(memory)
        except BlockingIOError:
            continue
        received += memory[:count]
        if count < room and not is_readable(receiver):  # nothing that the selector does not report is left
            with pytest.raises(BlockingIOError):
                receiver.recv_into(memory)
    assert received == sent
    for end in (sender, receiver):
        end.close()


def test_what_was_sent_before_the_end_is_received_first(security):
    (sender, receiver), _ = connected(security)
    sender.send(b"last words")
    sender.close()
    assert receiver.recv(4) == b"last"
    assert receiver.recv(100) == b" words"
    with pytest.raises(ConnectionResetError, match="the other process has closed the connection"):
        receiver.recv(1)
    receiver.close()


def test_bytes_that_were_changed_on_the_way_are_an_error(security):
    (sender, receiver), pair = connected(security)
    sender.send(b"a gradient")
    content = bytearray(pair[1].recv(1000))
    content[-1] ^= 1
    pair[0].send(content)
    with pytest.raises(OSError, match=r"(?i)bad record mac"):
        receiver.recv(100)
    for end in (sender, receiver):
        end.close()
