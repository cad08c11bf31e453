"""Queue of events: order, what a selector sees, and many events at once."""

import select
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machine_speed import scaled
from paceline.engines.distributed.transport.event_queue import EventQueue

LIMIT_S = scaled(20)


@pytest.fixture
def events():
    with closing(EventQueue()) as events:
        yield events


def is_readable(events):
    return bool(select.select([events], [], [], 0)[0])


@given(st.lists(st.one_of(st.integers(0, 9), st.none(), st.sampled_from("abc"))))
def test_events_come_in_their_order_and_a_selector_sees_whether_there_are_any(actions):
    """An integer is put, None gets the oldest, and a letter the first number with a remainder."""
    expected = []
    with closing(EventQueue()) as events:
        for action in actions:
            if isinstance(action, int):
                events.put(action)
                expected.append(action)
            elif action is None and expected:
                assert events.get() == expected.pop(0)
            elif action is not None:
                rest = "abc".index(action)
                first = next((number for number in expected if number % 3 == rest), None)
                if first is not None:
                    assert events.get_first(lambda number, rest=rest: number % 3 == rest) == first
                    expected.remove(first)
            assert events.is_empty == (not expected)
            assert is_readable(events) == bool(expected)


@pytest.mark.slow
def test_more_events_than_a_pipe_holds_do_not_block(events):
    for number in range(200_000):
        events.put(number)
    assert [events.get() for _ in range(200_000)] == list(range(200_000))
    assert not is_readable(events)


def test_a_wanted_event_is_awaited(events):
    with ThreadPoolExecutor() as pool:
        awaited = pool.submit(events.get_first, lambda number: number > 2)
        for number in range(4):
            events.put(number)
        assert awaited.result(LIMIT_S) == 3
    assert [events.get() for _ in range(3)] == [0, 1, 2]
