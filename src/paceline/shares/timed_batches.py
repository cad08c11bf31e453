"""Batches of an update with the time that a rank took for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from math import isnan
from typing import NamedTuple, TypeVar
from zlib import crc32

from paceline.errors import UsageError
from paceline.recording.timed_updates import TimedUpdate
from paceline.shares.batches import Dealt
from paceline.shares.stopwatch import Spans
from paceline.shares.texts import refusal_of_places

Number = TypeVar("Number", int, float)


class TimedBatches(NamedTuple):
    """Batches of an update, and the time that they took.

    Attributes:
        dealt: their shares.
        spans: when this rank loaded and computed.
        ended_s: time at which their sums ended.
        is_first: whether one of the sizes is new to this rank: a device tunes, and a compiler compiles.
        divisor: number by which the loss was divided; nan if it was not read.
        ahead: batches that the script had taken ahead of them.
    """

    dealt: list[Dealt]
    spans: Spans
    ended_s: float
    is_first: bool
    divisor: float
    ahead: int

    @property
    def work(self) -> list[float]:
        """Work of each rank."""
        return _sums(dealt.work for dealt in self.dealt)

    @property
    def mark(self) -> float:
        """Number that is the same on all ranks which divide the same samples alike, and have taken as many batches."""
        divisions = [(dealt.samples, dealt.work, dealt.checksum) for dealt in self.dealt]
        return float(crc32(repr((divisions, self.ahead)).encode()))

    def timed(self, seconds: list[float]) -> TimedUpdate:
        """Return the update of these batches, given the seconds of each rank; it begins where the one before ended."""
        samples = _sums(dealt.samples for dealt in self.dealt)
        equal_work = _sums(dealt.equal_work for dealt in self.dealt)
        living = [rank for rank, count in enumerate(samples) if count]
        work = self.work
        return TimedUpdate(
            began_s=self.ended_s,
            ended_s=self.ended_s,
            ranks=living,
            samples=[samples[rank] for rank in living],
            seconds=[seconds[rank] for rank in living],
            work=[work[rank] for rank in living],
            equal_work=[equal_work[rank] for rank in living],
        )


def seconds_of_updates(columns: Iterable[Sequence[float]], updates: int) -> list[list[float]]:
    """Return the seconds of each rank in each update, with which exchanged rows begin; 0 for a rank that is lost."""
    return [[0.0 if isnan(each) else each for each in column] for column in islice(columns, updates)]


def check_marks(columns: Iterable[Sequence[float]]) -> None:
    """Check that all ranks have divided the same samples alike in some updates.

    Args:
        columns: marks of the ranks, by update; nan for a rank that is lost.

    Raises:
        UsageError: they have not: one has taken more batches than others, or draws the samples in another order.
    """
    for marks in columns:
        if len({each for each in marks if not isnan(each)}) > 1:
            raise UsageError(refusal_of_places())


def _sums(rows: Iterable[Iterable[Number]]) -> list[Number]:
    return [sum(each) for each in zip(*rows, strict=True)]
