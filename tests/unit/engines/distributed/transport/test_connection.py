"""A line between two sides: when its receives are posted, and that everything comes in order all the same."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from paceline.engines.distributed.transport.connection import AHEAD, Connection, ConnectionLost
from paceline.engines.distributed.transport.messages import (
    Interrupting,
    RemoteTask,
    RemoteTaskCancelled,
    RemoteTaskDone,
)
from ranks import context, free_port
from this_process import in_thread, torn

WORK = RemoteTask(1, 7, True, 0.5, None, None, None)
FINISHED = RemoteTaskDone(1, 0, 0.1, 0.5, 1, 1.0, 0.0, True, 0.1)
SIZE = 1_000_000


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


def line(store, side, rooms=None):
    made = Connection(store, "line", side, dist.ProcessGroupGloo.create_device(hostname="127.0.0.1"), silence_s=5.0)
    made.make_rooms(rooms or [torch.zeros(1000), torch.zeros(1000)])
    made._group = Recorded(made._group)
    return made


def test_who_has_received_posts_nothing_before_it_answers(sides):
    server, worker = sides
    worker.send(FINISHED)
    for draw in range(3):
        worker._group.done.clear()
        server.send(WORK._replace(draw=draw), pieces=[(0, torch.full([1000], float(draw)))])
        assert worker.receive() == WORK._replace(draw=draw)
        worker.receive_pieces([0])
        assert worker._rooms[0].tolist() == [draw] * 1000
        server.send(Interrupting(draw))
        assert worker.receive() == Interrupting(draw)
        assert worker._group.done == []
        worker.send(RemoteTaskCancelled(draw, 0))
        assert worker._group.done == ["recv"] * 4 + ["send"], "two messages, a room and an end, before the answer"


def test_a_piece_that_comes_twice_finds_its_room_twice(sides):
    server, worker = sides
    server.send(WORK)
    worker.receive()
    worker.send_piece(1, torch.full([1000], 1.0))
    again = [torch.full([1000], 3.0)]
    worker.send(FINISHED, again, pieces=[(0, torch.full([1000], 2.0))], will_be_answered=True)
    assert server.receive() == FINISHED
    server.receive_pieces(range(2))
    assert [room.tolist() for room in server._rooms] == [[2.0] * 1000, [1.0] * 1000]
    server.receive_into(server._rooms[1])
    assert server._rooms[1].tolist() == [3.0] * 1000


@pytest.mark.parametrize("count", [1, AHEAD, 5 * AHEAD])
def test_more_messages_than_are_expected_come_in_order_without_an_answer(sides, count):
    server, worker = sides
    worker.send(FINISHED)
    assert server.receive() == FINISHED
    for draw in range(count):
        server.send(Interrupting(draw))
    assert [worker.receive().draw for _ in range(count)] == list(range(count))


# --- somebody dies while it sends -----------------------------------------------------------------------------


def store_at(port, *, is_server):
    return dist.TCPStore("127.0.0.1", port, None, is_server, timedelta(seconds=20), wait_for_workers=False)


def die_while_sending(port, is_piece):
    worker = line(store_at(port, is_server=False), 1)
    worker.receive()
    content = torn(SIZE)
    worker.send(FINISHED, [] if is_piece else [content], pieces=[(0, content)] if is_piece else None)
    with suppress(ConnectionLost):  # where gloo's own thread sends, it ends the process
        worker.receive()


@pytest.mark.parametrize("is_piece", [True, False])
def test_who_has_received_a_half_hears_that_the_other_half_will_not_come(is_piece):
    port, room = free_port(), torch.zeros(SIZE)
    store = store_at(port, is_server=True)
    sender = context().Process(target=die_while_sending, args=(port, is_piece), daemon=True)
    sender.start()
    server = line(store, 0, [room])
    server.send(WORK)
    assert server.receive() == FINISHED
    waiting, raised = in_thread(lambda: server.receive_pieces([0]) if is_piece else server.receive_into(room))
    waiting.join(10.0)
    assert [type(error) for error in raised] == [ConnectionLost]
    assert (room[0], room[-1]) == (1, 0)
    server.close()
    sender.join()
