"""Both sides of a connection over each kind of socket, and what arrives at them."""

import queue
import socket
from contextlib import contextmanager

import torch

from machine_speed import scaled
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.security import TokenSecurity
from paceline.engines.distributed.transport.socket_loop import SocketLoop
from paceline.engines.distributed.transport.tls import TLSSecurity, derive_identity
from paceline.engines.distributed.transport.transport import Transport
from paceline.recording.metrics.network_counters import NetworkCounters

SOON_S = scaled(20.0)
SECURITIES = {
    "plain": lambda: TokenSecurity("tests"),
    "tls": lambda: TLSSecurity(derive_identity("tests")),
}


class Listening:
    """What arrives at one side.

    Args:
        connection: the side.
    """

    def __init__(self, connection):
        self.connection = connection
        self.arrived = queue.SimpleQueue()
        self.ends = queue.SimpleQueue()
        connection.listen(lambda message, at_s, contents_s: self.arrived.put(message), self.ends.put)

    def next(self, count=1):
        return [self.arrived.get(timeout=SOON_S) for _ in range(count)]

    def end(self):
        """Return the reason of the end; an end that is reported twice is an error."""
        reason = self.ends.get(timeout=SOON_S)
        self.flush()
        assert self.ends.empty()
        return reason

    def rest(self):
        """Return what has arrived and was not asked for, after the end."""
        return [self.arrived.get() for _ in range(self.arrived.qsize())]

    def flush(self):
        """Wait until the threads of the sockets have done what they had to do."""
        for loop in (self.connection._loop, self.connection._data_loop, self.connection._loop):
            loop.call_and_wait(lambda: None)


@contextmanager
def memory_sides(heartbeat_timeout_s=60.0):
    """Yield both sides of a connection over socket pairs: the first with one thread, the second with two."""
    loops = [SocketLoop() for _ in range(3)]
    control, data = socket.socketpair(), socket.socketpair()
    sides = [
        Connection(loops[i], control[i], data[i], heartbeat_timeout_s, NetworkCounters(), data_loop=loops[2 * i])
        for i in range(2)
    ]
    sides[0].waits_for_reader = True  # as a transport sets it on the side that listens
    try:
        yield sides
    finally:
        for side in sides:
            side.close()
        for i in (1, 2, 0):  # a thread of messages is told the end of the tensors
            loops[i].call_and_wait(lambda: None)
        for loop in loops:
            loop.close()


@contextmanager
def transport_sides(security, heartbeat_timeout_s=60.0):
    """Yield the connections of a server and of a client on loopback."""
    server, client = (Transport(SECURITIES[security], "1", heartbeat_timeout_s) for _ in range(2))
    accepted = queue.SimpleQueue()
    listener = server.listen("127.0.0.1", 0, accepted.put, accepted.put)
    try:
        connected = client.connect(listener.address)
        sides = [accepted.get(timeout=SOON_S), connected]
        yield sides
        for side in sides:
            side.close()
    finally:
        listener.close()
        for each in (client, server):
            each.close()


KINDS = {
    "memory": memory_sides,
    "plain": lambda **options: transport_sides("plain", **options),
    "tls": lambda **options: transport_sides("tls", **options),
}


def tcp_pair():
    """Return two connected sockets on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    return here, there


@contextmanager
def raw_peer(make_pair=socket.socketpair, heartbeat_timeout_s=60.0):
    """Yield a connection, and the control socket and the data socket of its other side."""
    loop = SocketLoop()
    control, data = make_pair(), make_pair()
    connection = Connection(loop, control[0], data[0], heartbeat_timeout_s, NetworkCounters())
    try:
        yield connection, control[1], data[1]
    finally:
        connection.close()
        loop.close()
        for sock in (control[1], data[1]):
            sock.close()


def buffers(*sizes):
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


def filled(size, value):
    return torch.full([size], value, dtype=torch.uint8)
