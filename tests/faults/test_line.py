"""A line between two sides: when its receives are posted, and that everything comes in order all the same."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed as dist

from paceline.engines.distributed.line import AHEAD, Line
from paceline.engines.distributed.messages import Abandoned, Finished, Interrupting, Work

WORK = Work(1, 7, True, 0.5, None, None, None)
FINISHED = Finished(1, 0, 0.1, 0.5, 1, 1.0, 0.0, True, 0.1)


class Recorded:
    """A process group, and what was done with it."""

    def __init__(self, group):
        self._group = group
        self.done = []

    def recv(self, *args):
        self.done.append("recv")
        return self._group.recv(*args)

    def send(self, *args):
        self.done.append("send")
        return self._group.send(*args)


@pytest.fixture
def sides():
    """Return the line of a server and that of a worker, each with rooms for two pieces."""
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        making = [pool.submit(line, store, side) for side in range(2)]
        server, worker = [each.result() for each in making]
    yield server, worker
    server.close()
    worker.close()


def line(store, side):
    made = Line(store, "line", side, dist.ProcessGroupGloo.create_device(hostname="127.0.0.1"), silence_s=5.0)
    made.make_rooms([torch.zeros(1000), torch.zeros(1000)])
    made._group = Recorded(made._group)
    return made


def test_who_has_received_posts_nothing_before_it_answers(sides):
    server, worker = sides
    worker.send(FINISHED)
    for draw in range(3):
        worker._group.done.clear()
        server.send(WORK._replace(draw=draw), pieces=[(0, torch.full([1000], float(draw)))])
        assert worker.receive() == WORK._replace(draw=draw)
        worker.receive_piece(0)
        assert worker._rooms[0].tolist() == [draw] * 1000
        server.send(Interrupting(draw))
        assert worker.receive() == Interrupting(draw)
        assert worker._group.done == []
        worker.send(Abandoned(draw, 0))
        assert worker._group.done == ["recv"] * 3 + ["send"], "two messages and a room, before the answer"


def test_a_piece_that_comes_twice_finds_its_room_twice(sides):
    server, worker = sides
    server.send(WORK)
    worker.receive()
    worker.send_piece(1, torch.full([1000], 1.0))
    worker.send(FINISHED, pieces=[(0, torch.full([1000], 2.0)), (1, torch.full([1000], 3.0))], will_be_answered=True)
    assert server.receive() == FINISHED
    for number, value in [(0, 2.0), (1, 1.0), (1, 3.0)]:
        server.receive_piece(number)
        assert server._rooms[number].tolist() == [value] * 1000


@pytest.mark.parametrize("count", [1, AHEAD, 5 * AHEAD])
def test_more_messages_than_are_expected_come_in_order_without_an_answer(sides, count):
    server, worker = sides
    worker.send(FINISHED)
    assert server.receive() == FINISHED
    for draw in range(count):
        server.send(Interrupting(draw))
    assert [worker.receive().draw for _ in range(count)] == list(range(count))
