"""Stream from rank 0 to its standby, and which updates it waits for."""

from types import SimpleNamespace

import pytest
from torch import nn

from paceline.core.events import Apply, Timer
from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer, PeerLost, PeerMessage
from paceline.engines.distributed.standby.standby_stream import StandbyStream
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.standby_messages import StandbyListens, UpdateReceived, split_events
from paceline.errors import RunError
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout

PEER_ID = 7


def message(content):
    return PeerMessage(PEER_ID, content, at_s=0.0, contents_s=0.0)


class Stream:
    """Stream to a standby that answers when the test says so.

    Attributes:
        sent: messages to the standby.
    """

    def __init__(self):
        self.layout = FlatLayout(nn.Linear(2, 1))
        self._answers = EventQueue()
        self.stream = StandbyStream(self.layout, self._answers, lambda: ["a"])
        self.sent = []
        connection = SimpleNamespace(peer_host="standby", send=self.sent.append, close=lambda: None)
        self.stream.on_join(AcceptedPeer(PEER_ID, 2, connection))
        self.stream.on_event(message(StandbyListens(29000)))

    def add_mean(self, version, value):
        """Add an event and the mean gradient that makes this version."""
        self.stream.add(Timer(float(version)))
        mean = self.layout.allocate()
        mean.parameters[0].fill_(value)
        self.stream.add_mean(mean, Apply(version=version, gradients=(), lr_scale=1.0, reason=""))

    def receive(self, content):
        """Let a message of the standby come."""
        self._answers.put(message(content))

    @property
    def has_read_all(self):
        """Whether the stream has read all answers."""
        return self._answers.is_empty

    def updates(self):
        """Return version, times of the events and values of the mean gradient of each message."""
        return [
            (
                each.version,
                [event.now for event in split_events(each.events)],
                FlatBuffers(self.layout, each.tensors["mean"]).parameters[0].unique().tolist() if each.version else [],
            )
            for each in self.sent
            if isinstance(each, messages.FollowUpdate)
        ]


@pytest.fixture
def stream():
    return Stream()


def test_a_mean_gradient_is_sent_when_there_is_nothing_else_to_do(stream):
    stream.add_mean(1, 0.5)
    assert stream.updates() == []
    stream.stream.add(Timer(1.5))
    stream.stream.send()
    stream.stream.send()
    assert stream.updates() == [(1, [1.0], [0.5])]


def test_an_update_waits_until_the_standby_has_the_one_before(stream):
    stream.add_mean(1, 0.5)
    stream.receive(UpdateReceived(1))
    stream.add_mean(2, 0.25)
    assert stream.has_read_all
    assert [version for version, _, _ in stream.updates()] == [1]


def test_a_flush_sends_and_waits_for_the_newest_update(stream):
    stream.add_mean(1, 0.5)
    stream.receive(UpdateReceived(1))
    stream.stream.flush()
    assert stream.updates() == [(1, [1.0], [0.5])]
    assert stream.has_read_all
    stream.stream.flush()
    assert len(stream.sent) == 1


def test_a_standby_that_leaves_is_waited_for_no_longer(stream):
    stream.add_mean(1, 0.5)
    stream.receive(messages.Leave("SIGTERM"))
    stream.stream.flush()
    assert not stream.stream.is_there
    stream.add_mean(2, 0.25)
    stream.stream.flush()
    assert [version for version, _, _ in stream.updates()] == [1]


def test_the_end_follows_the_last_update(stream):
    stream.add_mean(1, 0.5)
    stream.stream.add(Timer(2.0))
    end = messages.End("", "1 update made")
    assert stream.stream.send_end(end) == [PEER_ID]
    assert stream.updates() == [(1, [1.0], [0.5]), (0, [2.0], [])]
    assert stream.sent[-1] is end


def test_processes_are_counted_and_not_numbers_of_workers():
    """Rank 0 ends though processes with the numbers of lost ones have joined it; those that were told do not count."""
    made = Stream()
    here = {"a", "b", "c"}
    stream = made.stream = StandbyStream(made.layout, EventQueue(), lambda: here, folder="runs/safe")
    stream.on_join(AcceptedPeer(PEER_ID, 2, SimpleNamespace(send=lambda message: None, close=lambda: None)))
    stream.send_begin("")
    here = {"a", "another with the number of b", "another with the number of c"}
    stream.check_workers()
    with pytest.raises(RunError, match=r"the standby and 2 of 3 workers .* its newest checkpoint is in runs/safe"):
        stream.on_event(PeerLost(PEER_ID, "no answer"))
    stream.forget("b")
    stream.check_workers()
