"""Forecast of the minibatches that a process will need next. Numbers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import NamedTuple

from paceline.core.events import Minibatch


class UpcomingMinibatch(NamedTuple):
    """Minibatch of one draw.

    Attributes:
        worker: number of the worker, >= 0.
        draw: number of the worker's draw, >= 1.
        minibatch: minibatch that the coordinator assigned, None if the worker samples it.
    """

    worker: int
    draw: int
    minibatch: Minibatch | None

    def __str__(self) -> str:
        """Return the draw for an error message.

        >>> str(UpcomingMinibatch(2, 5, Minibatch(0, 1, 17)))
        'worker 2, draw 5, minibatch 17 of epoch 1'
        """
        text = f"worker {self.worker}, draw {self.draw}"
        if self.minibatch is None:
            return text
        shard = f" of shard {self.minibatch.shard}" if self.minibatch.shard else ""
        if self.minibatch.number is None:
            return text + shard
        return f"{text}, minibatch {self.minibatch.number} of epoch {self.minibatch.epoch}{shard}"


def following(worker: int, draw: int, minibatches: Iterable[Minibatch]) -> list[UpcomingMinibatch]:
    """Return the draws of a worker that follow one draw, if these are their minibatches."""
    return [UpcomingMinibatch(worker, number, minibatch) for number, minibatch in enumerate(minibatches, draw + 1)]


class MinibatchForecast:
    """Forecast of every worker's next draws from its latest draw; the least recently served worker comes first.

    Without numbered minibatches, the next draw follows. A numbered minibatch advances by the same distance as last
    time, at first by the number of workers that share the data. The forecast is exact where each update waits for all
    workers, and an estimate elsewhere.

    Args:
        n: workers that share the numbered minibatches, >= 1.
        per_epoch: minibatches per epoch, None for data without numbered samples.
    """

    def __init__(self, n: int, per_epoch: int | None) -> None:
        self._n = n
        self._per_epoch = per_epoch
        self._latest: dict[int, tuple[UpcomingMinibatch, int]] = {}

    def observe(self, upcoming: UpcomingMinibatch) -> None:
        """Record that this draw was requested."""
        self._add(upcoming, self._latest)

    def is_past(self, upcoming: UpcomingMinibatch) -> bool:
        """Return whether this draw, or a later one of its worker, was requested."""
        latest = self._latest.get(upcoming.worker)
        return latest is not None and upcoming.draw <= latest[0].draw

    @property
    def workers(self) -> int:
        """Number of workers with at least one request."""
        return len(self._latest)

    def next(self, limit: int, known: Iterable[UpcomingMinibatch] = ()) -> list[UpcomingMinibatch]:
        """Return the draws that are expected next, in order.

        Args:
            limit: largest number of draws, >= 0.
            known: draws that are known to come first, in order.
        """
        first = list(islice(known, limit))
        latest = dict(self._latest)
        for upcoming in first:
            self._add(upcoming, latest)
        further = self._further(list(latest.values()))
        return [*first, *islice(further, limit - len(first))]

    def _further(self, latest: list[tuple[UpcomingMinibatch, int]]) -> Iterator[UpcomingMinibatch]:
        for ahead in count(1) if latest else ():
            for upcoming, step in latest:
                minibatch = self._moved(upcoming.minibatch, ahead * step)
                yield UpcomingMinibatch(upcoming.worker, upcoming.draw + ahead, minibatch)

    def _add(self, upcoming: UpcomingMinibatch, latest: dict[int, tuple[UpcomingMinibatch, int]]) -> None:
        """Make a draw the latest one of its worker, with the distance to the worker's previous minibatch."""
        before, step = self._latest.get(upcoming.worker, (None, self._n))
        now = self._index(upcoming.minibatch)
        then = self._index(before.minibatch) if before is not None else None
        if before is not None and now is not None and then is not None and upcoming.draw > before.draw:
            distance = (now - then) // (upcoming.draw - before.draw)
            step = distance if distance > 0 else step
        latest.pop(upcoming.worker, None)  # so that it goes to the end, as the one served last
        latest[upcoming.worker] = (upcoming, step)

    def _index(self, minibatch: Minibatch | None) -> int | None:
        if minibatch is None or minibatch.epoch is None or minibatch.number is None or self._per_epoch is None:
            return None
        return minibatch.epoch * self._per_epoch + minibatch.number

    def _moved(self, minibatch: Minibatch | None, by: int) -> Minibatch | None:
        index = self._index(minibatch)
        if minibatch is None or index is None:
            return minibatch
        assert self._per_epoch is not None
        epoch, number = divmod(index + by, self._per_epoch)
        return Minibatch(minibatch.shard, epoch, number)
