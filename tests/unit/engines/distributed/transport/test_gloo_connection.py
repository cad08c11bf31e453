"""Connection on gloo: when it posts receives, and a peer that dies in the middle of a message."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from paceline.engines.distributed.transport.gloo_connection import GlooConnection
from torch import distributed as dist

from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.task_messages import (
    CancelTask,
    RemoteTask,
    RemoteTaskCancelled,
    RemoteTaskDone,
)
from ranks import context, free_port
from this_process import in_thread, torn

WORK = RemoteTask(1, 7, True, 0.5, None, None, None)
FINISHED = RemoteTaskDone(1, 0, 0.1, 0.5, 1, 1.0, 0.0, True, 0.1)
SIZE = 1_000_000


def line(store, side, buffers=None):
    made = GlooConnection(
        store, "line", side, dist.ProcessGroupGloo.create_device(hostname="127.0.0.1"), keepalive_timeout_s=5.0
    )
    made.post_buckets(buffers or [torch.zeros(1000), torch.zeros(1000)])
    return made


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


def test_a_receiver_posts_no_receive_before_its_reply():
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        server, worker = pool.map(lambda side: line(store, side), range(2))
    worker._group = Recorded(worker._group)
    worker.send(FINISHED)
    for draw in range(3):
        worker._group.done.clear()
        server.send(WORK._replace(draw=draw), buckets=[(0, torch.full([1000], float(draw)))])
        assert worker.recv() == WORK._replace(draw=draw)
        worker.recv_buckets([0])
        assert worker._buffers[0].tolist() == [draw] * 1000
        server.send(CancelTask(draw))
        assert worker.recv() == CancelTask(draw)
        assert worker._group.done == []
        worker.send(RemoteTaskCancelled(draw, 0))
        assert worker._group.done == ["recv"] * 4 + ["send"], "two messages, a room and an end, before the answer"
    server.close()


def store_at(port, *, is_server):
    return dist.TCPStore("127.0.0.1", port, None, is_server, timedelta(seconds=20), wait_for_workers=False)


def die_while_sending(port, is_piece):
    worker = line(store_at(port, is_server=False), 1)
    worker.recv()
    content = torn(SIZE)
    worker.send(FINISHED, [] if is_piece else [content], buckets=[(0, content)] if is_piece else None)
    with suppress(ConnectionLost):  # where gloo's own thread sends, it ends the process
        worker.recv()


@pytest.mark.processes
@pytest.mark.parametrize("is_piece", [True, False])
def test_a_receiver_of_half_a_message_notices_that_the_connection_has_ended(is_piece):
    port, room = free_port(), torch.zeros(SIZE)
    store = store_at(port, is_server=True)
    sender = context().Process(target=die_while_sending, args=(port, is_piece), daemon=True)
    sender.start()
    server = line(store, 0, [room])
    server.send(WORK)
    assert server.recv() == FINISHED
    waiting, raised = in_thread(lambda: server.recv_buckets([0]) if is_piece else server.recv_into(room))
    waiting.join(10.0)
    assert [type(error) for error in raised] == [ConnectionLost]
    assert (room[0], room[-1]) == (1, 0)
    server.close()
    sender.join()
