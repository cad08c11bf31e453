"""Thread of the sockets: order of calls, timers and sockets, and errors in them."""

import queue
import socket
import threading
from contextlib import closing
from selectors import EVENT_READ

import pytest

from machine_speed import scaled
from paceline.engines.distributed.transport.socket_loop import SocketLoop

LIMIT_S = scaled(20)


@pytest.fixture
def loop():
    with closing(SocketLoop()) as loop:
        yield loop


def test_calls_of_all_threads_run_in_the_thread_of_the_loop_and_in_order(loop):
    done = queue.SimpleQueue()
    for number in range(100):
        loop.call(lambda number=number: done.put((number, threading.current_thread().name)))
    assert [done.get(timeout=LIMIT_S) for _ in range(100)] == [(n, "paceline-sockets") for n in range(100)]


def test_timers_run_in_the_order_of_their_times(loop):
    done = queue.SimpleQueue()

    def start():
        for delay_s in (0.03, 0.0, 0.02, 0.01, 0.01):
            loop.call_later(delay_s, lambda delay_s=delay_s: done.put(delay_s))

    loop.call(start)
    assert [done.get(timeout=LIMIT_S) for _ in range(5)] == [0.0, 0.01, 0.01, 0.02, 0.03]


def test_a_ready_socket_is_read_before_a_timer_that_is_due(loop):
    """So that a pause of this process does not count as silence of another one."""
    ours, theirs = socket.socketpair()
    order = queue.SimpleQueue()

    def read():
        ours.recv(1)
        order.put("socket")

    def pause():
        loop.watch(ours, EVENT_READ, read)
        loop.call_later(0.0, lambda: order.put("timer"))
        theirs.send(b"x")

    loop.call(lambda: loop.call_later(0.0, pause))
    assert [order.get(timeout=LIMIT_S) for _ in range(2)] == ["socket", "timer"]
    loop.call(lambda: loop.watch(ours, 0, read))
    for each in (ours, theirs):
        each.close()


def test_an_error_in_a_handler_is_logged_and_the_loop_goes_on(loop, caplog):
    done = threading.Event()

    def fail():
        raise RuntimeError("a mistake")

    loop.call(fail)
    loop.call(lambda: loop.call_later(0.0, fail))
    loop.call(lambda: loop.call_later(0.0, done.set))
    assert done.wait(LIMIT_S)
    assert caplog.text.count("RuntimeError: a mistake") == 2


def test_a_socket_is_watched_for_other_events_or_not_at_all(loop):
    ours, theirs = socket.socketpair()
    heard = queue.SimpleQueue()
    first, second = (lambda: heard.put((1, ours.recv(1)))), (lambda: heard.put((2, ours.recv(1))))
    for handler, events in ((first, EVENT_READ), (second, EVENT_READ), (second, 0)):
        is_watched = threading.Event()
        loop.call(lambda handler=handler, events=events: loop.watch(ours, events, handler))
        loop.call(is_watched.set)
        assert is_watched.wait(LIMIT_S)
        theirs.send(b"x")
        if events:
            assert heard.get(timeout=LIMIT_S) == (1 if handler is first else 2, b"x")
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.05)
    for each in (ours, theirs):
        each.close()


def test_what_is_to_be_called_is_called_before_the_loop_ends():
    done = queue.SimpleQueue()
    loop = SocketLoop()
    for number in range(10):
        loop.call(lambda number=number: done.put(number))
    loop.close()
    assert [done.get_nowait() for _ in range(10)] == list(range(10))
    loop.call(lambda: done.put("late"))
    assert done.empty()
