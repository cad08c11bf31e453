"""Roll call of the ranks through the launcher's store: events, reports, and a gloo group for each generation."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from paceline.errors import RunError
from paceline.shares.survival.agreement import PlaceReport
from paceline.shares.survival.replicas import told_replicas
from paceline.shares.survival.roll import Event, Roll, key_of, tell, told

dist: Any = torch.distributed  # it does not export the types of all its names
LOOPBACK = "127.0.0.1"
LONG = timedelta(days=365)
LOOK_EACH_S = 5.0
LATE_S = 0.1  # between looks for an event in the place of an end
POLL_S = 0.005  # between looks at the reports of the other ranks
TOLD_S = 60.0  # for the launcher to tell why a group has failed
END_TIMEOUT_S = 1.0
TIMEOUT = timedelta(minutes=30)  # of an operation, as torch's
IMMEDIATELY = timedelta(milliseconds=1)
THREADS = 2


class InterruptedMeetingError(Exception):
    """A meeting that ended because of another event."""


class RollCall:
    """Events of all ranks as they come, and meetings of those that live.

    Args:
        connect: function that returns a new client of the launcher's store.
        rank: number of this rank.
        ranks: number of ranks.
        is_one_host: whether all ranks are on one host.

    Attributes:
        store: client of the store, for this thread.
        replicas: replicas of the model.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, ranks: int, *, is_one_host: bool) -> None:
        self._connect = connect
        self._is_one_host = is_one_host
        self._rank = rank
        self._ranks = ranks
        self.store = connect()
        self.replicas = told_replicas(self.store, ranks)
        self.store.delete_key(end_of(rank))  # of an earlier life
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._has_ended = threading.Event()

    def watch(self, on_event: Callable[[int, Event], object], look: Callable[[], object]) -> None:
        """Call functions in threads of their own.

        Args:
            on_event: called with each new generation, and the event with which it came.
            look: called each `LOOK_EACH_S`.
        """
        self._watchers = [
            threading.Thread(target=self._watch, args=(self._connect(), on_event), daemon=True),
            threading.Thread(target=self._look, args=(look,), daemon=True),
        ]
        for each in self._watchers:
            each.start()

    def end(self) -> None:
        """End the threads, which could not go on once the interpreter ends."""
        self._has_ended.set()
        with suppress(RuntimeError):  # the launcher has ended, and so has the first one
            self.store.compare_set(key_of(len(self._events), self._rank), "", "")  # unless an event is there by now
        for each in self._watchers:
            each.join(END_TIMEOUT_S)

    def tell(self, event: Event) -> int:
        """Write an event down, and return its number."""
        return tell(self.store, event, self._ranks)

    def roll(self) -> Roll:
        """Return the roll after the events so far."""
        with self._changed:
            return Roll.called(self.replicas, self._events)

    def after(self, generation: int) -> Roll:
        """Return the roll of a newer generation, which is waited for.

        Raises:
            RunError: there is none.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._events) > generation, TOLD_S):
                raise RunError("an operation of the process group failed, and no rank was lost")
        return self.roll()

    def meet(self, roll: Roll, report: PlaceReport) -> dict[int, PlaceReport]:
        """Return the reports of all living ranks, which are waited for.

        Raises:
            InterruptedMeetingError: another event has come.
        """
        keys = {rank: f"paceline/report/{roll.generation}/{rank}" for rank in roll.living}
        self.store.set(keys[self._rank], json.dumps(report))
        while not self.store.check(list(keys.values())):
            self._wait(roll, lambda: False, POLL_S)
        return {rank: PlaceReport(*as_tuples(json.loads(self.store.get(key)))) for rank, key in keys.items()}

    def connect(self, roll: Roll, members: Sequence[int]) -> Any:
        """Return a gloo group of living ranks, all of which do the same.

        Args:
            roll: roll of the generation.
            members: ranks of the group, in order; those of two groups of a generation begin with another one, or are
                another number.

        Raises:
            InterruptedMeetingError: another event has come.
        """
        prefix = f"paceline/group/{roll.generation}/{members[0]}/{len(members)}"
        store = dist.PrefixStore(prefix, self._connect())
        made: list[Any] = []

        def make() -> None:
            group = self._group(store, members)
            with self._changed:
                made.append(group)
                self._changed.notify_all()

        threading.Thread(target=make, daemon=True).start()  # gloo waits on for a rank that is lost meanwhile
        self._wait(roll, lambda: bool(made), TIMEOUT.total_seconds())
        return made[0]

    def _group(self, store: Any, members: Sequence[int]) -> Any:
        rank, size = members.index(self._rank), len(members)
        if not self._is_one_host:  # the addresses of hosts are found as torch finds them
            return dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = TIMEOUT
        options._threads = THREADS
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        return dist.ProcessGroupGloo(store, rank, size, options)

    def part(self, roll: Roll) -> None:
        """Wait until all living ranks have come to their end.

        Raises:
            InterruptedMeetingError: an event has come before.
        """
        self.leave()
        while not self.has_ended(roll.living):
            self._wait(roll, lambda: False, POLL_S)

    def has_ended(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks have come to their end."""
        return bool(self.store.check([end_of(rank) for rank in ranks]))

    def ended_among(self, ranks: Iterable[int]) -> list[int]:
        """Return which of some ranks have come to their end."""
        return [rank for rank in ranks if self.has_ended([rank])]

    def leave(self) -> None:
        """Tell that this rank has come to its end, without waiting for the others."""
        self.store.set(end_of(self._rank), "1")

    def others_have_ended(self) -> bool:
        """Return whether the living ranks have come to their end."""
        return self.has_ended(Roll.called(self.replicas, told(self.store, self._ranks)).living)

    def await_end(self) -> None:
        """Wait for the end of the living, in a rank that is none of them."""
        with self._changed:
            while not self.has_ended(Roll.called(self.replicas, self._events).living):
                self._changed.wait(END_TIMEOUT_S)

    def check(self, roll: Roll) -> None:
        """Check that no event has come since a roll.

        Raises:
            InterruptedMeetingError: one has.
        """
        self._wait(roll, lambda: True, 0.0)

    def _wait(self, roll: Roll, is_done: Callable[[], bool], timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: is_done() or len(self._events) > roll.generation, timeout_s)
            if len(self._events) > roll.generation:
                raise InterruptedMeetingError

    def _look(self, look: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the launcher has ended
            while not self._has_ended.wait(LOOK_EACH_S):
                look()

    def _watch(self, store: Any, on_event: Callable[[int, Event], object]) -> None:
        while True:
            key = key_of(len(self._events), self._rank)
            try:
                store.wait([key], LONG)
            except RuntimeError:  # the launcher has ended
                return
            while not (text := store.get(key).decode()):
                if self._has_ended.wait(LATE_S):  # else an earlier life of this rank has left its end there
                    return
            event = Event.from_text(text)
            with self._changed:
                self._events.append(event)
                self._changed.notify_all()
            on_event(len(self._events), event)


def end_of(rank: int) -> str:
    """Return the key that says that a rank has come to its end."""
    return f"paceline/end/{rank}"


def dispose(groups: list[Any]) -> threading.Thread:
    """Disconnect the gloo groups of a list, whose operations then fail, and destroy them; both may take long."""

    def end() -> None:
        while groups:
            group = groups.pop()
            for peer in range(group.size()):
                with suppress(RuntimeError):  # gloo closes a connection on which a wait has timed out
                    group.recv([torch.zeros(1)], peer, 0).wait(IMMEDIATELY)

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    return ending


def as_tuples(value: Any) -> Any:
    """Return a value from JSON with tuples in place of lists."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
