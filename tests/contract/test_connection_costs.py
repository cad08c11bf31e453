"""What a connection costs and leaves behind: memory of a slow side, threads, files; its end from any thread."""

import threading
from contextlib import contextmanager

import psutil
import pytest
import torch

from connected_sides import KINDS, Listening, filled, transport_sides
from machine_speed import scaled
from paceline.engines.distributed.transport.connection import MAX_WAITING
from paceline.engines.distributed.transport.messages import Leave
from paceline.engines.distributed.transport.task_messages import CancelTask, GradientStarted, RemoteTask
from selections import parametrize_few
from this_process import in_thread, what_is_open

TASK = RemoteTask(draw=1, version=7, sends_version=True, run_s=0.5)
LARGE = 24_000_000  # bytes of a bucket that no buffer of the operating system holds

LONG = Leave("x" * 4000)
FLOOD = 6000


@pytest.fixture(params=list(KINDS))
def sides(request):
    """Return the connections of a server and of a worker."""
    with KINDS[request.param]() as made:
        yield made


def test_a_side_without_memory_reads_nothing_and_the_sender_copies_nothing(sides):
    server, worker = sides
    at_server = Listening(server)
    bucket = torch.zeros(100_000_000, dtype=torch.uint8)  # takes no memory before it is written
    before_bytes = psutil.Process().memory_info().rss
    worker.send_bucket(0, bucket)
    worker.send(CancelTask(1))
    at_server.next()
    assert psutil.Process().memory_info().rss - before_bytes < 30_000_000
    assert worker._data.is_sending


def test_two_sides_that_flood_each_other_on_both_sockets_do_not_stall():
    """Both queues are full before either side reads: each must go on to read although it cannot send."""
    with transport_sides("plain") as sides:
        buffers_of_both = [[torch.zeros(LARGE, dtype=torch.uint8)] for _ in sides]
        at_sides = [Listening(side) for side in sides]
        for side, memory in zip(sides, buffers_of_both, strict=True):
            side.post_buckets(memory)
        with paused(*sides):
            for side in sides:
                side.send(TASK, [(0, filled(LARGE, 3))])
                for _ in range(FLOOD):
                    side.send(LONG)
                side.send(CancelTask(2))
            assert min(side._control.unsent for side in sides) > MAX_WAITING
            assert all(side._data.is_sending for side in sides)
        for at_side, [memory] in zip(at_sides, buffers_of_both, strict=True):
            arrived = at_side.next(FLOOD + 2)
            assert arrived.count(LONG) == FLOOD
            assert {TASK, CancelTask(2), LONG} == {*arrived}
            assert memory.eq(3).all()


@contextmanager
def paused(*sides):
    """Stop the threads of both sides meanwhile."""
    going_on = threading.Event()
    for side in sides:
        for loop in {side._loop, side._data_loop}:
            loop.call(lambda: going_on.wait(scaled(20.0)))
    try:
        yield
    finally:
        going_on.set()


@parametrize_few("number", [0, 1], keep=1)
def test_closing_one_side_ends_both_once_and_sending_raises_nothing(sides, number):
    listening = [Listening(side) for side in sides]
    for _ in range(2):
        in_thread(sides[number].close)
    for each in listening:
        assert each.end()
    for side in sides:
        side.send(TASK, [(0, filled(LARGE, 1))])
        side.send_bucket(0, filled(LARGE, 1))
    for each in listening:
        each.flush()
        assert each.ends.empty()
        assert each.rest() == []


def test_what_was_sent_before_the_end_is_delivered_before_it(sides):
    server, worker = sides
    for draw in range(100):
        worker.send(GradientStarted(draw, 0.0))
    worker.close()
    at_server = Listening(server)
    at_server.end()
    assert [message.draw for message in at_server.rest()] == list(range(100))


@pytest.mark.parametrize("security", ["plain", "tls"])
def test_no_thread_and_no_file_is_left(security):
    with transport_sides(security):  # modules that are imported once, and the log
        pass
    before = what_is_open()
    with transport_sides(security) as (server, worker):
        worker.send(TASK)
        assert server.recv(scaled(20.0)) == TASK
    assert what_is_open() == before
