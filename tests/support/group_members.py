"""Group of ranks without processes: connections, and the membership server of rank 0."""

import threading
from types import SimpleNamespace
from unittest.mock import Mock

from paceline.engines.distributed.allreduce.membership import MembershipServer
from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer
from paceline.engines.distributed.transport.connection import ConnectionLost


class Wire:
    """Connection that records the messages sent, and receives the given messages and then none."""

    def __init__(self, *coming):
        self.sent = []
        self._coming = iter(coming)

    def send(self, message, **_):
        self.sent.append(message)

    def recv(self):
        return next(self._coming, None) or threading.Event().wait()

    def release_sent(self):
        pass

    def close(self):
        pass


class LostGroup:
    """Group that cannot start a sum."""

    def begin_sum(self, vectors):
        raise ConnectionLost("cut off")

    def abort(self):
        pass


def rank(**changes):
    settings = {"elastic": False, "silence_s": 5.0, "worker": 1, "start_timeout_s": 5.0, "n": 3}
    cluster = SimpleNamespace(**{**settings, "has_gpu_each": lambda gpus: True, **changes})
    return SimpleNamespace(cluster=cluster, transport=None)


def server_with(*members, **changes):
    server = MembershipServer(rank(**changes), {}, lambda: 0.0)
    server._acceptor = Mock()
    for member in members:
        server.on_join(member)
    return server


def peer(worker, connection, name="", has_own_gpu=True):
    return AcceptedPeer(worker, worker, connection, name, has_own_gpu)
