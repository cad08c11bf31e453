"""Group of ranks without processes: connections, and the membership server of rank 0."""

from types import SimpleNamespace
from unittest.mock import Mock

import torch

from paceline.engines.distributed.allreduce.membership import MembershipServer
from paceline.engines.distributed.allreduce.step_reports import StepReports
from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer
from paceline.engines.distributed.transport.connection import ConnectionLost
from sum_groups import transport


class Wire:
    """Connection that records the messages sent, and receives the given messages and then none."""

    local_host = "127.0.0.1"

    def __init__(self, *coming):
        self.sent = []
        self._coming = coming

    def send(self, message, buckets=()):
        self.sent.append(message)

    def listen(self, on_message, on_end):
        for message in self._coming:
            on_message(message, 0.0, 0.0)

    def close(self):
        pass


class LostGroup:
    """Group that cannot start a sum."""

    def begin_sum(self, vectors):
        raise ConnectionLost("cut off")

    def abort(self):
        pass


def rank(**changes):
    settings = {"is_elastic": False, "heartbeat_timeout_s": 5.0, "worker": 1, "start_timeout_s": 5.0}
    settings |= {"n": 3, "started": 3}
    cluster = SimpleNamespace(**{**settings, **changes})
    link = transport(cluster.heartbeat_timeout_s)
    return SimpleNamespace(cluster=cluster, transport=link, folder=None, device=torch.device("cpu"))


def server_with(*members, **changes):
    server = MembershipServer(rank(**changes), {}, StepReports(lambda: 0.0, groups=1))
    server._acceptor = Mock()
    for member in members:
        server.on_join(member)
    return server


def peer(worker, connection, name="", gpu=""):
    return AcceptedPeer(peer_id=worker, worker=worker, connection=connection, name=name, gpu=gpu)
