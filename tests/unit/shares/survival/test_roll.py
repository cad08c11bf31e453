"""Events of the ranks in the launcher's store, of which no death of a writer leaves a part."""

import pytest
from torch.distributed import TCPStore

from paceline.shares.survival.roll import FAILED, LOST, Event, key_of, tell, told

RANKS = 3
EVENTS = [Event(LOST, 0), Event(FAILED, 2, 7), Event(LOST, 1)]


class WriterDiedError(Exception):
    pass


class DyingWriter:
    """Client of a store whose process dies before one of its operations.

    Args:
        store: the store.
        after: number of operations before that.
    """

    def __init__(self, store, after):
        self._store = store
        self._left = after

    def __getattr__(self, name):
        if not self._left:
            raise WriterDiedError
        self._left -= 1
        return getattr(self._store, name)


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def known_to(store, rank, number):
    key = key_of(number, rank)
    return store.check([key]) and Event.from_text(store.get(key).decode())


@pytest.mark.parametrize("reads", [True, False], ids=["a reader", "the next writer"])
@pytest.mark.parametrize("after", range(6))
def test_an_event_whose_writer_dies_is_known_to_all_ranks_or_was_never_written(store, after, reads):
    tell(store, EVENTS[0], RANKS)
    with pytest.raises(WriterDiedError):
        tell(DyingWriter(store, after), EVENTS[1], RANKS)
    events = told(store, RANKS) if reads else EVENTS[: 1 + (after > 1)]
    assert len(events) == 1 + (after > 1)  # one operation reads the number, and the next one writes
    assert tell(store, EVENTS[2], RANKS) == len(events)
    expected = [*events, EVENTS[2]]
    assert told(store, RANKS) == expected == [EVENTS[0], *EVENTS[1 : len(events)], EVENTS[2]]
    for rank in range(RANKS):
        assert [known_to(store, rank, number) for number in range(len(expected))] == expected
        assert not known_to(store, rank, len(expected))


def test_equal_events_of_two_writers_are_two_events(store):
    assert [tell(store, EVENTS[0], RANKS) for _ in range(2)] == [0, 1]
    assert told(store, RANKS) == [EVENTS[0]] * 2
