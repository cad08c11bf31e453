"""Strangers at the port of a server: silence, garbage and resets keep no process of the job out."""

import os
import socket
import time
from contextlib import suppress

import pytest

from attackers import client_hello, dial, is_closed_within, memory_mb, reset, security, serving, transport
from paceline.engines.distributed.transport import listener
from paceline.engines.distributed.transport.listener import HANDSHAKE_S, MAX_CANDIDATES
from selections import parametrize_few
from this_process import wait_until

STRANGERS = 200
ATTEMPTS = 3  # the machine may be busy
JOIN_S, CLOSED_S, MEMORY_MB = 0.5, 5.0, 10.0
HELLO = client_hello()
GARBAGE = {
    "silence": b"",
    "random bytes": os.urandom(500),
    "half a ClientHello": HELLO[: len(HELLO) // 2],
    "a long ClientHello": b"\x16\x03\x01\x40\x00\x01\x01\xff\xf0\x03\x03" + bytes(16000),
    "no certificate": HELLO,
    "HTTP": b"GET / HTTP/1.1\r\nHost: paceline\r\n\r\n",
    "a huge frame": bytes(32) + b"\xff" * 4096,
    "a byte a second": b"\x16",
}


@pytest.fixture(params=[True, False], ids=["TLS", "plain"])
def protection(request):
    return security(encrypt=request.param)


@pytest.fixture
def strangers():
    """Sockets that are closed afterwards."""
    made = []
    yield made
    for sock in made:
        sock.close()


def joining_s(server, protection):
    """Return the seconds that a process of the job needs to connect."""
    with transport(protection) as client:
        began_s = time.monotonic()
        client.connect(server.address)
        return time.monotonic() - began_s


@parametrize_few("kind", GARBAGE, keep=1)
def test_a_process_of_the_job_is_in_beside_200_strangers(protection, strangers, kind):
    with serving(protection) as server:
        joining_s(server, protection)  # loads what the first connection needs
        before_mb = memory_mb()
        strangers += [server.dial(GARBAGE[kind]) for _ in range(STRANGERS)]
        taken_s = min(joining_s(server, protection) for _ in range(ATTEMPTS))
        taken_mb = memory_mb() - before_mb
        print(f"{kind}: joined after {taken_s:.3f} s, {taken_mb:.1f} MB")
        assert taken_s < JOIN_S
        assert taken_mb < MEMORY_MB
        wait_until(lambda: len(server.connections) == 1 + ATTEMPTS)


@pytest.mark.slow
def test_200_strangers_that_send_a_byte_a_second_are_closed(strangers, caplog):
    with serving(security(encrypt=True)) as server:
        strangers += [server.dial() for _ in range(STRANGERS)]
        began_s = time.monotonic()
        while time.monotonic() < began_s + HANDSHAKE_S:
            for sock in strangers:
                drip(sock)
            time.sleep(1.0)
        for sock in strangers:
            assert is_closed_within(sock, max(0.01, began_s + CLOSED_S - time.monotonic()))
        assert not server.connections
    assert "rejected a connection from 127.0.0.1: " in caplog.text
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1  # one a host


def drip(sock):
    with suppress(OSError):  # it has been closed
        sock.send(b"\x16")


def test_a_reset_in_the_handshake_does_not_end_the_deadlines_of_others(protection, strangers, caplog, monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.3)
    with serving(protection) as server:
        for content in (b"", b"x", HELLO) * 20:
            reset(server.dial(content))
        strangers += [server.dial() for _ in range(3)]
        assert all(is_closed_within(sock, CLOSED_S) for sock in strangers)
        assert joining_s(server, protection) < JOIN_S
    assert "Traceback" not in caplog.text


def test_strangers_that_come_without_end_use_a_bounded_number_of_files(protection, strangers, caplog):
    with serving(protection) as server:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(4):
            strangers += [server.dial(GARBAGE["half a ClientHello"]) for _ in range(MAX_CANDIDATES)]
            wait_until(lambda: is_quiet(server.address))
        opened = len(os.listdir("/proc/self/fd")) - before - len(strangers)
        assert opened <= MAX_CANDIDATES
        assert joining_s(server, protection) < JOIN_S
    assert "Traceback" not in caplog.text


def is_quiet(address):
    """Return whether the server has accepted all connections that wait: a new one is served at once."""
    with dial(address, b"GET / HTTP/1.1\r\n" + bytes(64)) as sock:
        return is_closed_within(sock, 2.0)


def test_a_process_that_is_half_connected_stays_while_strangers_push_in(protection, strangers):
    """The control socket is authenticated, and its data socket comes late."""
    with serving(protection) as server, transport(protection) as client:
        handshake = client._handshake

        def after_strangers(address, security, preamble, deadline_s):
            if not preamble.is_control:
                strangers.extend(server.dial(HELLO) for _ in range(MAX_CANDIDATES))
                assert is_quiet(server.address)
            return handshake(address, security, preamble, deadline_s)

        client._handshake = after_strangers
        client.connect(server.address)
        wait_until(lambda: len(server.connections) == 1)  # the client may be ready first


def test_strangers_of_one_host_displace_each_other_and_not_a_slow_host(strangers):
    """A process far away has sent half of its handshake when a neighbour opens a thousand connections."""
    protection = security(encrypt=True)
    with serving(protection) as server:
        far = socket.socket()
        far.bind(("127.0.0.2", 0))
        far.connect(server.address)
        far.sendall(GARBAGE["half a ClientHello"])
        strangers.append(far)
        assert is_quiet(server.address)
        strangers += [server.dial(GARBAGE["half a ClientHello"]) for _ in range(2 * MAX_CANDIDATES)]
        assert is_quiet(server.address)
        assert not is_closed_within(far, 0.05)
