"""Forecast of the minibatches that a process will be asked for next. Numbers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import NamedTuple

from paceline.core.events import Minibatch


class UpcomingMinibatch(NamedTuple):
    """The work of one draw.

    Attributes:
        worker: whose draw it is.
        draw: number of the worker's work, >= 1.
        minibatch: as the coordinator dealt it, None where the worker draws for itself.
    """

    worker: int
    draw: int
    minibatch: Minibatch | None


class MinibatchForecast:
    """Next work of every worker, from its latest work; the worker that was served longest ago comes first.

    A worker that draws for itself goes on with its next draw. A worker with numbered minibatches goes on by the same
    distance as last time, at first by the number of workers that share the data. That is exact where all workers are
    waited for in each update, and a guess elsewhere.

    Args:
        n: workers that share the numbered minibatches, >= 1.
        per_epoch: minibatches in one pass, None for data without numbered samples.
    """

    def __init__(self, n: int, per_epoch: int | None) -> None:
        self._n = n
        self._per_epoch = per_epoch
        self._latest: dict[int, tuple[UpcomingMinibatch, int]] = {}

    def served(self, piece: UpcomingMinibatch) -> None:
        """Note that this work was asked for."""
        _, step = self._following(piece)
        self._latest.pop(piece.worker, None)
        self._latest[piece.worker] = (piece, step)

    def is_past(self, piece: UpcomingMinibatch) -> bool:
        """Return whether its worker has been asked for this or later work."""
        latest = self._latest.get(piece.worker)
        return latest is not None and piece.draw <= latest[0].draw

    @property
    def workers(self) -> int:
        """Workers that were served."""
        return len(self._latest)

    def next(self, limit: int, coming: Iterable[UpcomingMinibatch] = ()) -> list[UpcomingMinibatch]:
        """Return the work that will be asked for next, in order.

        Args:
            limit: pieces at most, >= 0.
            coming: what is known already, in order.
        """
        known = list(islice(coming, limit))
        latest = dict(self._latest)
        for piece in known:
            _, step = self._following(piece)
            latest.pop(piece.worker, None)
            latest[piece.worker] = (piece, step)
        further = self._further(list(latest.values()))
        return [*known, *islice(further, limit - len(known))]

    def _further(self, latest: list[tuple[UpcomingMinibatch, int]]) -> Iterator[UpcomingMinibatch]:
        for ahead in count(1) if latest else ():
            for piece, step in latest:
                minibatch = self._moved(piece.minibatch, ahead * step)
                yield UpcomingMinibatch(piece.worker, piece.draw + ahead, minibatch)

    def _following(self, piece: UpcomingMinibatch) -> tuple[UpcomingMinibatch, int]:
        """Return a piece with the distance to its worker's one before."""
        before, step = self._latest.get(piece.worker, (None, self._n))
        now = self._place(piece.minibatch)
        then = self._place(before.minibatch) if before is not None else None
        if before is None or now is None or then is None or piece.draw <= before.draw:
            return piece, step
        distance = (now - then) // (piece.draw - before.draw)
        return piece, distance if distance > 0 else step

    def _place(self, minibatch: Minibatch | None) -> int | None:
        if minibatch is None or minibatch.epoch is None or minibatch.number is None or self._per_epoch is None:
            return None
        return minibatch.epoch * self._per_epoch + minibatch.number

    def _moved(self, minibatch: Minibatch | None, by: int) -> Minibatch | None:
        place = self._place(minibatch)
        if minibatch is None or place is None:
            return minibatch
        assert self._per_epoch is not None
        return Minibatch(minibatch.shard, *divmod(place + by, self._per_epoch))
