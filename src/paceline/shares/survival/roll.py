"""Roll of the ranks that live, from the events that the launcher and the ranks write down in one order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from paceline.clusters.launch_env import EVENT, EVENTS
from paceline.shares.survival.replicas import Replicas, tell_replica, told_replicas

LOST, BACK, FAILED = "lost", "back", "failed"


class Event(NamedTuple):
    """Event in the life of a rank.

    Attributes:
        what: `LOST` for a process that has ended, `BACK` for one that takes part again, both with all of its replica;
            `FAILED` for one that goes on without the gradients of a backward pass.
        rank: number of the rank.
        position: place in the script at which a rank takes part again, or fails.
    """

    what: str
    rank: int
    position: int = 0

    @classmethod
    def from_text(cls, text: str) -> Event:
        """Return the event that `str` has written; another word after it makes the text unique.

        >>> Event.from_text("back 3 17")
        Event(what='back', rank=3, position=17)
        """
        what, rank, position = text.split()[:3]
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
    def called(cls, replicas: Replicas, events: Sequence[Event]) -> Roll:
        """Return the roll of the ranks of all replicas after the events: those of one leave and return together.

        >>> Roll.called(Replicas.of_one_rank(3), [Event(LOST, 1), Event(FAILED, 0, 7)])
        Roll(generation=2, living=(0, 2))
        >>> Roll.called(Replicas(((0, 1), (2, 3))), [Event(LOST, 1)])
        Roll(generation=1, living=(2, 3))
        """
        living = {rank for members in replicas.members for rank in members}
        for event in events:
            if event.what == BACK:
                living |= {*replicas.of(event.rank)}
            elif event.what == LOST:
                living -= {*replicas.of(event.rank)}
        return cls(len(events), tuple(sorted(living)))


def key_of(number: int, rank: int) -> str:
    """Return the key in the launcher's store under which a rank waits for an event."""
    return f"{EVENT}/{number}/{rank}"


def tell(store: Any, event: Event, ranks: int) -> int:
    """Write an event down in the launcher's store, for this many ranks, and return its number.

    One operation of the store writes it, so a process that dies here leaves the whole event or none.
    """
    mine, number = f"{event} {uuid4().hex}", store.add(EVENTS, 0)
    while (text := store.compare_set(_written_at(number), "", mine).decode()) != mine:
        _pass_on(store, number, text, ranks)
        number += 1
    _pass_on(store, number, mine, ranks)
    return int(number)


def told(store: Any, ranks: int) -> list[Event]:
    """Return the events so far, and let these ranks know of those whose writer has died before it told them all."""
    events: list[Event] = []
    passed_on = store.add(EVENTS, 0)
    while store.check([_written_at(len(events))]):
        text = store.get(_written_at(len(events))).decode()
        if len(events) >= passed_on:
            _pass_on(store, len(events), text, ranks)
        events.append(Event.from_text(text))
    return events


def tell_loss(store: Any, rank: int, ranks: int) -> bool:
    """Tell this many ranks that one has ended; return whether it was one that lives."""
    replicas = told_replicas(store, ranks)
    is_loss = rank in Roll.called(replicas, told(store, ranks)).living
    if is_loss:
        tell(store, Event(LOST, rank), ranks)
    tell_replica(store, replicas, rank)
    return is_loss


def _written_at(number: int) -> str:
    return f"{EVENT}/{number}"


def _pass_on(store: Any, number: int, text: str, ranks: int) -> None:
    """Let the ranks know of an event; all earlier ones have been passed on."""
    for rank in range(ranks):
        store.compare_set(key_of(number, rank), "", text)
    store.set(EVENTS, str(number + 1))  # which may undo a later one: then that event is passed on twice
