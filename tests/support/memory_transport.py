"""Transport in one process: connections in memory, and groups for sums on gloo over the loopback interface.

A rank that is a thread has a transport of its own, so that closing it is what the end of its process would be.
"""

import threading
from collections import defaultdict, deque
from contextlib import suppress
from functools import cached_property

from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.gloo import CONNECT_TIMEOUT_S, disconnect_pair, dist, gloo_group
from paceline.engines.distributed.transport.transport import Endpoint, Transport
from paceline.errors import UsageError


class Direction:
    """What is on its way to one side of a link."""

    def __init__(self):
        self.headers = deque()
        self.contents = deque()
        self.buckets = defaultdict(deque)  # by number


class Link:
    """State that both sides of a connection share."""

    def __init__(self):
        self.changed = threading.Condition()
        self.is_closed = False
        self.to = Direction(), Direction()

    def close(self):
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class MemoryConnection(Connection):
    """One side of a link.

    What is sent is copied when it is received, so that memory which changes before it may is noticed.

    Args:
        link: link that both sides share.
        side: 0 or 1.
    """

    def __init__(self, link, side):
        super().__init__()
        self._link = link
        self._in, self._out = link.to[side], link.to[1 - side]
        self._is_closed = False
        self._buffers = []

    def _send(self, header, contents, buckets, *, will_be_answered):
        with self._link.changed:
            if self._link.is_closed:
                return
            self._out.headers.append(header)
            self._out.contents.extend(contents)
            for number, bucket in buckets or ():
                self._out.buckets[number].append(bucket)
            self._link.changed.notify_all()

    def send_bucket(self, number, bucket):
        with self._link.changed:
            self._out.buckets[number].append(bucket)
            self._link.changed.notify_all()

    def release_sent(self):
        pass

    def _recv_header(self):
        return self._next(self._in.headers)

    def recv_into(self, contents):
        self._copy(self._in.contents, contents)

    def post_buckets(self, buffers):
        self._buffers = list(buffers)

    def recv_buckets(self, numbers):
        self.recv_early_buckets(numbers)

    def recv_early_buckets(self, numbers):
        for number in numbers:
            if number >= len(self._buffers):
                raise ConnectionLost(f"invalid bucket {number}")
            self._copy(self._in.buckets[number], self._buffers[number])

    def close(self):
        self._is_closed = True
        self._link.close()

    def _copy(self, queue, target):
        source = self._next(queue)
        if source.shape != target.shape:
            raise ConnectionLost(f"{source.numel()} numbers came, {target.numel()} were expected")
        target.copy_(source)

    def _next(self, queue):
        """Return what comes next; what had been sent before the other side closed the link comes first."""
        with self._link.changed:
            self._link.changed.wait_for(lambda: queue or self._link.is_closed)
            if self._is_closed or not queue:
                raise ConnectionLost("Connection closed by peer")
            return queue.popleft()


class MemoryNetwork:
    """Stores by their addresses, and links whose other side has not come yet."""

    def __init__(self):
        self.changed = threading.Condition()
        self.stores = {}
        self._links = {}

    @cached_property
    def device(self):
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")

    def link(self, name):
        """Return the link of this name once both sides have asked for it."""
        with self.changed:
            link = self._links.pop(name, None)
            if link is not None:
                self.changed.notify_all()
                return link
            link = self._links[name] = Link()
            if self.changed.wait_for(lambda: self._links.get(name) is not link, CONNECT_TIMEOUT_S):
                return link
            del self._links[name]
        raise ConnectionLost("the other process did not connect")


class MemoryTransport(Transport):
    """Transport of one rank.

    Args:
        network: network that all ranks share.
        on_use: is called when a process is reached, and before this one listens.
    """

    keepalive_timeout_s = 5.0
    poll_s = 0.002

    def __init__(self, network, on_use=lambda: None):
        self._network = network
        self._on_use = on_use
        self._ours = []  # addresses
        self._connections = []
        self._groups = []
        self._is_closed = False

    def listen(self, host, port=0, name=None):
        self._on_use()
        with self._network.changed:
            address = name or host, port or 50_000 + len(self._network.stores)
            if address in self._network.stores:
                raise UsageError(f"cannot listen on {address[0]}:{address[1]} (Address already in use)")
            store = self._network.stores[address] = dist.HashStore()
        self._ours.append(address)
        return Endpoint(self, address, None), store

    def reach(self, address):
        self._on_use()
        return Endpoint(self, address, None) if address in self._network.stores else None

    def store(self, address):
        if address not in self._network.stores:
            raise RuntimeError("connection refused")
        return self._network.stores[address]

    def connect(self, endpoint, key, side):
        connection = MemoryConnection(self._network.link((endpoint.address, endpoint.shard, key)), side)
        self._connections.append(connection)
        if self._is_closed:
            self.close()
        return connection

    def group(self, store, rank, size, device, *, timeout_s=CONNECT_TIMEOUT_S, threads=1):
        limits = {"keepalive_timeout_s": self.keepalive_timeout_s, "timeout_s": timeout_s, "threads": threads}
        group = gloo_group(store, rank, size, self._network.device, **limits)
        self._groups.append((group, [peer for peer in range(size) if peer != rank]))
        if self._is_closed:
            self.close()
        return group

    def close(self):
        """End all that this rank has opened, as the end of its process does."""
        self._is_closed = True
        for address in self._ours:
            self._network.stores.pop(address, None)
        for connection in self._connections:
            connection.close()
        for group, peers in self._groups:
            for peer in peers:
                with suppress(RuntimeError):
                    disconnect_pair(group, peer)
        self._groups.clear()


def memory_connections():
    """Return both sides of a connection in memory."""
    link = Link()
    return [MemoryConnection(link, side) for side in range(2)]
