"""Roll call of the ranks: what a life of a rank leaves in the store does not hide events from its next one."""

import queue

import pytest
from torch.distributed import TCPStore

from paceline.shares.survival.roll import LOST, Event, key_of, tell
from paceline.shares.survival.roll_call import RollCall
from rank_threads import LIMIT_S

RANK, RANKS = 1, 2
EVENT = Event(LOST, 0)


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def life(store):
    """Return a function that begins a life of the rank."""
    return lambda: RollCall(lambda: TCPStore("127.0.0.1", store.port), RANK, RANKS, is_one_host=True)


def test_a_life_sees_the_event_in_whose_place_an_earlier_one_has_ended(store, life):
    first = life()
    first.watch(lambda *_: None, lambda: None)
    first.end()
    seen, second = queue.SimpleQueue(), life()
    second.watch(lambda _, event: seen.put(event), lambda: None)
    second._watchers[0].join(0.3)  # it has met the end of the first life by then
    tell(store, EVENT, RANKS)
    assert seen.get(timeout=LIMIT_S) == EVENT
    second.end()
    assert not any(each.is_alive() for each in second._watchers)


def test_an_end_takes_no_event_away(store, life):
    first = life()
    first._watchers = []  # which have not seen the event yet
    tell(store, EVENT, RANKS)
    first.end()
    assert Event.from_text(store.get(key_of(0, RANK)).decode()) == EVENT
