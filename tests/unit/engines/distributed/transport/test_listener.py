"""Listener: both sockets of a connection belong together by their nonce, and every step before has a deadline."""

import queue
import socket
import time
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from machine_speed import scaled
from paceline.engines.distributed.transport import listener as listener_module
from paceline.engines.distributed.transport.listener import Listener
from paceline.engines.distributed.transport.security import PREAMBLE_BYTES, Preamble, TokenSecurity, run_blocking
from paceline.engines.distributed.transport.socket_loop import SocketLoop
from paceline.recording.metrics.network_counters import NetworkCounters, RejectionCause
from this_process import wait_until

LIMIT_S = scaled(20)
SECURITY = TokenSecurity("tests")
ONE, OTHER = b"1" * 16, b"2" * 16
NONE = dict.fromkeys(RejectionCause, 0)


class Accepting:
    """A listener on loopback, the pairs of sockets that it has accepted, and sockets to it."""

    def __init__(self, loop, opened):
        self.pairs = queue.SimpleQueue()
        self.rejections = queue.SimpleQueue()
        self.counters = NetworkCounters()
        self._opened = opened
        sock = socket.create_server(("127.0.0.1", 0))
        self.listener = Listener(loop, sock, SECURITY, "1", self.pairs.put, self.rejections.put, self.counters)
        opened.callback(self.listener.close)

    def dial(self):
        return self._opened.enter_context(socket.create_connection(self.listener.address, timeout=LIMIT_S))

    def authenticated(self):
        """Return a socket after the handshake, without a preamble."""
        sock = self.dial()
        sock.setblocking(False)
        run_blocking(SECURITY.authenticate(sock, is_server=False), sock, time.monotonic() + LIMIT_S)
        sock.settimeout(LIMIT_S)
        return sock

    def sent(self, nonce, *, is_control, run_id="", version="1"):
        """Return a socket on which a preamble was sent, and of which the listener has read it."""
        sock = self.authenticated()
        sock.sendall(Preamble.of(version, run_id, nonce, is_control=is_control).encode())
        return sock

    def waiting(self, count):
        """Wait until so many authenticated sockets have no partner."""
        wait_until(lambda: sum(each.preamble is not None for each in [*self.listener._candidates]) == count)

    def next_pair(self):
        pair = self.pairs.get(timeout=LIMIT_S)
        for each in pair:
            self._opened.enter_context(each)
        return pair


@contextmanager
def accepting():
    with closing(SocketLoop()) as loop, ExitStack() as opened:
        yield Accepting(loop, opened)


@pytest.fixture
def server():
    with accepting() as made:
        yield made


@pytest.mark.parametrize("control_first", [True, False])
def test_sockets_are_paired_by_their_nonce_in_any_order(server, control_first):
    made = {}
    for nonce, is_control in [(ONE, control_first), (OTHER, not control_first), (OTHER, control_first)]:
        made[nonce, is_control] = server.sent(nonce, is_control=is_control)
    control, data = server.next_pair()
    assert control.getpeername() == made[OTHER, True].getsockname()
    assert data.getpeername() == made[OTHER, False].getsockname()
    assert Preamble.decode(made[OTHER, True].recv(PREAMBLE_BYTES)).version == "1"
    server.waiting(1)
    made[ONE, not control_first] = server.sent(ONE, is_control=not control_first)
    control, data = server.next_pair()
    assert control.getpeername() == made[ONE, True].getsockname()
    assert data.getpeername() == made[ONE, False].getsockname()
    assert server.pairs.empty()


def test_two_sockets_of_the_same_kind_are_no_pair(server):
    for _ in range(2):
        server.sent(ONE, is_control=True)
    server.waiting(2)
    assert server.pairs.empty()


def test_another_version_is_answered_and_reported_once_and_another_run_is_not(server):
    for is_control in (True, False):
        sock = server.sent(ONE, is_control=is_control, version="2")
        assert Preamble.decode(sock.recv(PREAMBLE_BYTES)).version == "1"
        assert sock.recv(1) == b""
    assert "runs paceline 2, this one 1" in server.rejections.get(timeout=LIMIT_S)
    sock = server.sent(ONE, is_control=True, run_id="another")
    assert Preamble.decode(sock.recv(PREAMBLE_BYTES)).run == Preamble.of("1", "").run
    assert sock.recv(1) == b""
    assert server.rejections.empty()
    assert server.pairs.empty()
    assert server.counters.rejected == NONE | {RejectionCause.OTHER_VERSION: 1, RejectionCause.OTHER_RUN: 1}


@pytest.mark.parametrize("stage", ["no byte", "half a handshake", "no preamble", "half a preamble", "no partner"])
def test_each_step_of_a_connection_has_the_same_deadline(stage, monkeypatch, caplog):
    monkeypatch.setattr(listener_module, "HANDSHAKE_S", 0.2)
    steps = {
        "no byte": lambda server: server.dial(),
        "half a handshake": lambda server: sending(server.dial(), bytes(5)),
        "no preamble": lambda server: server.authenticated(),
        "half a preamble": lambda server: sending(server.authenticated(), b"1" * (PREAMBLE_BYTES - 1)),
        "no partner": lambda server: server.sent(ONE, is_control=True),
    }
    with accepting() as server:
        sock = steps[stage](server)
        with suppress(ConnectionResetError):  # the listener has not read what was sent
            while sock.recv(1 << 10):
                pass
        assert server.pairs.empty()
        assert server.counters.rejected == NONE | {RejectionCause.TIMEOUT: 1}
    assert "no complete handshake within 0.2 s" in caplog.text


def sending(sock, content):
    sock.sendall(content)
    return sock


def test_a_full_listener_closes_the_oldest_with_the_least_progress(server, monkeypatch):
    monkeypatch.setattr(listener_module, "MAX_CANDIDATES", 3)
    waiting = server.sent(ONE, is_control=True)
    server.waiting(1)
    begun = sending(server.dial(), bytes(5))
    wait_until(lambda: sum(each.progress for each in [*server.listener._candidates]) == 3)
    first, second = server.dial(), server.dial()
    assert first.recv(1 << 10) == b""
    sending(second, bytes(5)).recv(1)
    last = server.dial()
    assert begun.recv(1 << 10)
    assert begun.recv(1) == b""
    sending(last, bytes(5)).recv(1)
    server.sent(ONE, is_control=False)
    assert server.next_pair().control.getpeername() == waiting.getsockname()
    assert server.counters.rejected == NONE | {RejectionCause.OVERLOAD: 3}


def test_a_closed_listener_closes_what_is_not_connected_yet_and_leaves_what_is(server):
    for is_control in (True, False):
        server.sent(ONE, is_control=is_control)
    control, _ = server.next_pair()
    late = server.sent(OTHER, is_control=True)
    server.waiting(1)
    server.listener.close()
    assert late.recv(1) == b""
    assert control.send(b"x") == 1
    with pytest.raises(ConnectionRefusedError):
        server.dial()
