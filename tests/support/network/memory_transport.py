"""A network in memory for ranks that are threads of one process: socket pairs instead of TCP and TLS."""

import itertools
import socket
import threading
import weakref

from machine_speed import scaled
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.gloo import CONNECT_TIMEOUT_S, disconnect_pair
from paceline.engines.distributed.transport.security import AuthenticationFailed, TokenSecurity
from paceline.engines.distributed.transport.transport import Transport
from paceline.errors import UsageError

HEARTBEAT_TIMEOUT_S = scaled(5.0)


class MemoryNetwork:
    """Listeners of all ranks, by their addresses, and the store of torchrun's agents."""

    def __init__(self):
        self.lock = threading.Lock()
        self.listeners = {}
        self.free_ports = itertools.count(50_000)


class MemoryListener:
    """Listener of a rank."""

    def __init__(self, transport, address, on_connection):
        self.transport = transport
        self.address = address
        self.on_connection = on_connection

    def close(self):
        with self.transport.network.lock:
            self.transport.network.listeners.pop(self.address, None)
        self.transport.wait_for_loop()  # until all that were accepted are reported


class MemoryTransport(Transport):
    """Transport of one rank.

    Args:
        network: network that all ranks share.
        on_use: is called when a process is reached, and before this one listens.
        heartbeat_timeout_s: as in `Transport`.

    Attributes:
        token: secret that the other side must have too.
    """

    poll_s = 0.002

    def __init__(self, network, on_use=lambda: None, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S):
        super().__init__(lambda: TokenSecurity("tests"), "tests", heartbeat_timeout_s)
        self.network = network
        self.token = ""
        self._on_use = on_use
        self._lock = threading.Lock()
        self._listeners = []
        self._connections = []
        self._groups = []
        self._is_closed = False

    def listen(self, host, port, on_connection, on_reject):
        self._on_use()
        with self.network.lock:
            address = host, port or next(self.network.free_ports)
            if address in self.network.listeners:
                raise UsageError(f"cannot listen on {host}:{port} (Address already in use)")
            listener = self.network.listeners[address] = MemoryListener(self, address, on_connection)
        self._listeners.append(listener)
        return listener

    def connect(self, address):
        self._on_use()
        with self.network.lock:
            listener = self.network.listeners.get(address)
            if listener is None:
                raise ConnectionLost("{}:{} does not answer".format(*address))
            if listener.transport.token != self.token:
                raise AuthenticationFailed("{}:{} is not of this job".format(*address))
            control, data = socket.socketpair(), socket.socketpair()
            listener.transport._accept(listener, control[0], data[0])
        return self._keep(self._connection(control[1], data[1]))

    def group(self, store, rank, size, host, *, timeout_s=CONNECT_TIMEOUT_S, threads=1):
        group = super().group(store, rank, size, "127.0.0.1", timeout_s=timeout_s, threads=threads)
        # The owner ends a group: without a time limit, the end of this transport would wait for the other ranks.
        self._groups.append((weakref.ref(group), [peer for peer in range(size) if peer != rank]))
        if self._is_closed:
            self.kill()
        return group

    def kill(self):
        """End all that this rank has opened, as the end of its process does."""
        self._is_closed = True
        for listener in self._listeners:
            listener.close()
        self.disconnect()
        opened, self._groups = self._groups, []
        groups = [reference() for reference, _ in opened]  # None for one that its owner has ended
        for i in range(len(groups)):
            for peer in opened[i][1] if groups[i] is not None else []:
                disconnect_pair(groups[i], peer)
        # The destructor of a group may wait forever for a pair that the other thread closes at the same time. The end
        # of a process does not wait for it.
        threading.Thread(target=groups.clear, daemon=True, name="end of groups").start()

    def disconnect(self):
        """Close all connections, before any later message is sent."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()
        self.wait_for_loop()

    def wait_for_loop(self):
        """Wait for all that the thread of the sockets was to call; not in such a thread, also of another rank."""
        loop = self.__dict__.get("_loop")  # None once this side is closed
        if loop is not None and threading.current_thread().name != "paceline-sockets":
            for each in (loop, *self._data_loops, loop):
                each.call_and_wait(lambda: None)

    def _accept(self, listener, control, data):
        self._loop.call(lambda: listener.on_connection(self._keep(self._connection(control, data))))

    def _keep(self, connection):
        with self._lock:
            self._connections.append(connection)
        if self._is_closed:
            connection.close()
        return connection
