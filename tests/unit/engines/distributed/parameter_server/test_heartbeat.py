"""Who is asked whether it is alive, and when it counts as gone."""

from queue import SimpleQueue
from threading import Event

from paceline.engines.distributed.parameter_server.heartbeat import CHECKS, HeartbeatMonitor
from paceline.engines.distributed.rendezvous.acceptor import PeerLost

PATIENCE_S = 0.02
LIMIT_S = 20


class Server:
    """A line to a server, and its acceptor, with a number of looks between a question and its answer.

    Args:
        answers: how often it answers before it falls silent.
        late: looks that pass before its answer is there.
    """

    def __init__(self, answers, late=0):
        self._answers = answers
        self._late = late
        self._coming = []
        self.asked = 0
        self.is_asked_often = Event()
        self.is_disconnected = False

    def send(self, message):
        self.asked += 1
        if self.asked >= 6 * CHECKS:
            self.is_asked_often.set()
        if self.asked <= self._answers:
            self._coming.append(self._late)

    def was_active(self):
        was_active = 0 in self._coming
        self._coming = [each - 1 for each in self._coming if each > 0]
        return was_active


class Servers(dict):
    """Servers by peer id, and their acceptor."""

    def was_active(self, peer_id):
        return self[peer_id].was_active()

    def disconnect(self, peer_id):
        self[peer_id].is_disconnected = True


def test_who_answers_is_left_alone_however_late():
    servers, told = Servers({1: Server(answers=10**9), 2: Server(answers=10**9, late=CHECKS - 1)}), SimpleQueue()
    monitor = HeartbeatMonitor(servers, servers, told, lambda: PATIENCE_S)
    assert all(server.is_asked_often.wait(LIMIT_S) for server in servers.values())
    monitor.stop()
    asked = [server.asked for server in servers.values()]
    assert told.empty()
    assert not any(server.is_disconnected for server in servers.values())
    assert [server.asked for server in servers.values()] == asked  # no further requests


def test_who_falls_silent_is_reported_once_with_how_long_was_waited():
    servers, told = Servers({1: Server(answers=10**9), 2: Server(answers=25)}), SimpleQueue()
    monitor = HeartbeatMonitor(servers, servers, told, lambda: PATIENCE_S)
    assert told.get(timeout=LIMIT_S) == PeerLost(2, "silent for 0.02 s")
    monitor.stop()
    assert servers[2].asked == 26 + CHECKS  # one look sees the last answer
    assert [server.is_disconnected for server in servers.values()] == [False, True]
    assert told.empty()


def test_without_shards_nobody_asks():
    HeartbeatMonitor({}, Servers(), SimpleQueue(), lambda: 1 / 0).stop()
