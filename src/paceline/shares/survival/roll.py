"""Roll of the ranks that live, from the events that the launcher and the ranks write down in one order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.clusters.launch_env import EVENT, EVENTS

LOST, BACK, FAILED = "lost", "back", "failed"


class Event(NamedTuple):
    """Event in the life of a rank.

    Attributes:
        what: `LOST` for a process that has ended, `BACK` for one that takes part again, `FAILED` for one that goes on
            without the gradients of a backward pass.
        rank: number of the rank.
        position: place in the script at which a rank takes part again, or fails.
    """

    what: str
    rank: int
    position: int = 0

    @classmethod
    def from_text(cls, text: str) -> Event:
        """Return the event that `str` has written.

        >>> Event.from_text("back 3 17")
        Event(what='back', rank=3, position=17)
        """
        what, rank, position = text.split()
        return cls(what, int(rank), int(position))

    def __str__(self) -> str:
        return f"{self.what} {self.rank} {self.position}"


class Roll(NamedTuple):
    """Ranks that live after the first events.

    Attributes:
        generation: number of events.
        living: numbers of the ranks, in order.
    """

    generation: int
    living: tuple[int, ...]

    @classmethod
    def called(cls, ranks: int, events: Sequence[Event]) -> Roll:
        """Return the roll of this many ranks after the events.

        >>> Roll.called(3, [Event(LOST, 1), Event(FAILED, 0, 7)])
        Roll(generation=2, living=(0, 2))
        """
        living = set(range(ranks))
        for event in events:
            if event.what == BACK:
                living.add(event.rank)
            elif event.what == LOST:
                living.discard(event.rank)
        return cls(len(events), tuple(sorted(living)))


def key_of(number: int, rank: int) -> str:
    """Return the key in the launcher's store under which a rank waits for an event."""
    return f"{EVENT}/{number}/{rank}"


def tell(store: Any, event: Event, ranks: int) -> int:
    """Write an event down in the launcher's store, for this many ranks, and return its number."""
    number: int = store.add(EVENTS, 1) - 1
    for rank in range(ranks):
        store.set(key_of(number, rank), str(event))
    return number


def told(store: Any) -> list[Event]:
    """Return the events so far."""
    return [Event.from_text(store.get(key_of(number, 0)).decode()) for number in range(store.add(EVENTS, 0))]
