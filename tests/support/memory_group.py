"""Process group of two sides in one process: the part of gloo that a Connection uses."""

import threading
from collections import defaultdict, deque
from unittest.mock import patch

from torch import distributed as dist

from paceline.engines.distributed.transport import connection
from paceline.engines.distributed.transport.connection import Connection


class Link:
    """State that both sides share: operations without a counterpart, and whether the link is closed."""

    def __init__(self):
        self.changed = threading.Condition()
        self.is_closed = False
        self.sends = defaultdict(deque)  # by side and tag
        self.receives = defaultdict(deque)

    def close(self):
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class Operation:
    """A send or a receive, done when its counterpart has been posted."""

    def __init__(self, link, tensor):
        self._link = link
        self.tensor = tensor
        self.is_done = False

    def wait(self, timeout):
        """Wait; as with gloo, a wait that times out closes the link."""
        with self._link.changed:
            self._link.changed.wait_for(lambda: self.is_done or self._link.is_closed, timeout.total_seconds())
        if not self.is_done:
            self._link.close()
            raise RuntimeError("Connection closed by peer")


class MemoryGroup:
    """One side of a link.

    Args:
        link: link that both sides share.
        side: 0 or 1.
    """

    def __init__(self, link, side):
        self._link = link
        self._side = side

    def send(self, tensors, peer, tag):
        return self._post(tensors[0], self._link.sends[self._side, tag], self._link.receives[peer, tag], is_send=True)

    def recv(self, tensors, peer, tag):
        return self._post(tensors[0], self._link.receives[self._side, tag], self._link.sends[peer, tag], is_send=False)

    def _post(self, tensor, ours, theirs, is_send):
        operation = Operation(self._link, tensor)
        with self._link.changed:
            if self._link.is_closed:
                raise RuntimeError("Connection closed by peer")
            if not theirs:
                ours.append(operation)
                return operation
            other = theirs.popleft()
            source, target = (tensor, other.tensor) if is_send else (other.tensor, tensor)
            target.copy_(source)
            operation.is_done = other.is_done = True
            self._link.changed.notify_all()
        return operation


def memory_connections():
    """Return both sides of a connection in memory."""
    link = Link()
    with patch.multiple(
        connection,
        gloo_group=lambda store, rank, size, device: MemoryGroup(link, rank),
        set_keepalive_timeout=lambda *_: None,
        published_addresses=lambda *_: [],
    ):
        return [Connection(dist.HashStore(), "memory", side, None, keepalive_timeout_s=5.0) for side in range(2)]
