"""Transport: addresses that cannot work, the limit of open files, and what is left of it."""

import logging
import queue
import resource
import socket
from contextlib import closing

import pytest

import paceline as pl
from machine_speed import scaled
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.security import TokenSecurity
from paceline.engines.distributed.transport.transport import Transport

LIMIT_S = scaled(20)


def transport(heartbeat_timeout_s=60.0):
    return Transport(lambda: TokenSecurity("a secret"), "1", heartbeat_timeout_s)


def refuse(reason):
    raise AssertionError(reason)


@pytest.fixture
def soft_limit():
    """Return the hard limit of open files, below which the soft limit lies meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_raises_its_limit_of_open_files_and_says_so(soft_limit, caplog):
    caplog.set_level(logging.INFO, logger="paceline")
    with closing(transport()) as server:
        server.listen("127.0.0.1", 0, refuse, refuse).close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft_limit, soft_limit)
    assert f"raised the limit of open files from {soft_limit - 1} to {soft_limit}" in caplog.text


def test_an_address_in_use_and_one_of_another_host_are_refused():
    with closing(transport()) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            pl.UsageError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*Address already in use.*address="
        ):
            server.listen("127.0.0.1", port, refuse, refuse)
        with pytest.raises(pl.UsageError, match=r"cannot listen on 192\.0\.2\.1 .*an address of this host"):
            server.listen("192.0.2.1", 0, refuse, refuse)


def test_nothing_listens_at_an_address():
    with closing(transport()) as client, socket.create_server(("127.0.0.1", 0)) as other:
        address = other.getsockname()
        other.close()
        with pytest.raises(ConnectionLost, match=rf"127\.0\.0\.1:{address[1]} does not answer \(Connection refused\)"):
            client.connect(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_host_that_does_not_respond_is_noticed_by_the_operating_system_too(host):
    accepted = queue.SimpleQueue()
    with closing(transport(30.0)) as server, closing(transport(30.0)) as client:
        listener = server.listen(host, 0, accepted.put, refuse)
        connection = client.connect(listener.address)
        sides = connection, accepted.get(timeout=LIMIT_S)
        for each in sides:
            assert each.local_host == each.peer_host == host
            for stream in (each._control, each._data):
                assert stream._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) >= 30_000
                assert stream._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert stream._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for each in sides:
            each.close()
        listener.close()
