"""One suite for the connection over gloo and the connection in memory."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from paceline.engines.distributed.transport.gloo_connection import POSTED_HEADERS, GlooConnection
from torch import distributed as dist

from memory_transport import memory_connections
from paceline.engines.distributed.transport.connection import UNAUTHENTICATED_BYTES, ConnectionLost
from paceline.engines.distributed.transport.messages import Rejected
from paceline.engines.distributed.transport.task_messages import CancelTask, RemoteTask, RemoteTaskDone
from this_process import in_thread

WORK = RemoteTask(1, 7, True, 0.5, None, None, None)
FINISHED = RemoteTaskDone(1, 0, 0.1, 0.5, 1, 1.0, 0.0, True, 0.1)


def gloo_connections():
    store, device = dist.HashStore(), dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda side: GlooConnection(store, "connection", side, device, 5.0), range(2)))


@pytest.fixture(params=[gloo_connections, memory_connections], ids=["gloo", "memory"])
def sides(request):
    """Return the connections of a server and of a worker, each with buffers for two buckets."""
    sides = request.param()
    for side in sides:
        side.post_buckets([torch.zeros(1000), torch.zeros(1000)])
    yield sides
    for side in sides:
        side.close()


def test_a_bucket_can_be_sent_twice(sides):
    server, worker = sides
    server.send(WORK)
    worker.recv()
    worker.send_bucket(1, torch.full([1000], 1.0))
    resent = [torch.full([1000], 3.0)]
    worker.send(FINISHED, resent, buckets=[(0, torch.full([1000], 2.0))], will_be_answered=True)
    assert server.recv() == FINISHED
    server.recv_buckets(range(2))
    assert [room.tolist() for room in server._buffers] == [[2.0] * 1000, [1.0] * 1000]
    server.recv_into(server._buffers[1])
    assert server._buffers[1].tolist() == [3.0] * 1000


@pytest.mark.parametrize("count", [1, POSTED_HEADERS, 5 * POSTED_HEADERS])
def test_unexpected_messages_arrive_in_order_without_a_reply(sides, count):
    server, worker = sides
    worker.send(FINISHED)
    assert server.recv() == FINISHED
    for draw in range(count):
        server.send(CancelTask(draw))
    assert [worker.recv().draw for _ in range(count)] == list(range(count))


def test_a_control_message_arrives_as_it_was_sent(sides):
    server, worker = sides
    worker.send(Rejected("another job"), will_be_answered=True)
    assert server.recv() == Rejected("another job")
    server.send(WORK)
    assert worker.recv() == WORK
    worker.release_sent()


def test_a_peer_that_is_not_authenticated_may_send_short_messages_only(sides):
    server, worker = sides
    long = Rejected("x" * UNAUTHENTICATED_BYTES)
    worker.send(long)
    with pytest.raises(ConnectionLost, match="invalid message: control message of"):
        server.recv()
    worker.lift_size_limit()
    server.send(long)
    assert worker.recv() == long


@pytest.mark.parametrize("number", [0, 1])
def test_closing_one_side_ends_the_wait_on_both(sides, number):
    waiting = [in_thread(side.recv) for side in sides]
    sides[number].close()
    for thread, raised in waiting:
        thread.join(10.0)
        assert [type(error) for error in raised] == [ConnectionLost]
    sides[1 - number].send(WORK)  # is lost in silence
    with pytest.raises(ConnectionLost):
        sides[1 - number].recv()
