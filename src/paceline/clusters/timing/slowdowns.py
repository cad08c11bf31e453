"""Workers that become slower for a while: a piecewise-constant slowness over virtual time."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, inf, prod
from numbers import Integral
from operator import itemgetter

from numpy.random import Generator

from paceline.errors import UsageError
from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range

Selection = tuple[int, ...] | float
Piece = tuple[float, float]
"""The end of a piece of time in seconds, and how many times slower the worker computes until then."""

ALWAYS_NORMAL: tuple[Piece, ...] = ((inf, 1.0),)


@checked_types
@dataclass(frozen=True)
class Slowdown:
    """From ``at_s`` until ``until_s`` some workers compute ``factor`` times slower.

    Args:
        at_s: Virtual second at which it begins, >= 0.
        factor: How many times slower, > 0; below 1 the workers become faster.
        workers: Ids of the workers, or a fraction in (0, 1]: the first ceil(fraction * n) of them.
        until_s: Virtual second at which it ends, > at_s, may be inf.

    >>> Slowdown(at_s=160, factor=5, workers=0.5).affects(worker=7, n=16)
    True

    Source: Xu et al., "Dynamic Backup Workers", 2020, Fig. 9 (t=160 s, half of the workers, 5 times).
    """

    at_s: float
    factor: float
    workers: Selection
    until_s: float = inf

    def __post_init__(self) -> None:
        check_range("[0, inf)", at_s=self.at_s)
        check_range("(0, inf)", factor=self.factor)
        check_range(f"({self.at_s}, inf]", until_s=self.until_s)
        object.__setattr__(self, "workers", _checked(self.workers))

    def affects(self, worker: int, n: int) -> bool:
        """Return whether the worker is one of those slowed down in a cluster of n."""
        return _selects(self.workers, worker, n)

    def periods(self) -> Iterator[Piece]:
        """Yield the time before, the slow time, and what is left."""
        yield self.at_s, 1.0
        yield self.until_s, self.factor
        yield inf, 1.0


@checked_types
@dataclass(frozen=True)
class Periodic:
    """Transient stragglers by script: from ``at_s`` on, slow for ``on_s`` in every ``every_s`` seconds.

    ``work done in a whole period = every_s - on_s + on_s / slowdown`` seconds of work at normal speed

    Workers that are not slow at the same time are given one each, with their own ``at_s``.

    Args:
        on_s: Length of a slow period, seconds, > 0.
        every_s: From the beginning of a slow period to that of the next, seconds, > on_s.
        slowdown: How many times slower the worker computes in a slow period, > 0.
        workers: Ids of the workers, or a fraction in (0, 1]: the first ceil(fraction * n) of them.
        at_s: Virtual second at which the first slow period begins, >= 0.

    >>> SlownessProfile([Periodic(on_s=20, every_s=100, slowdown=5)]).duration_s(work_s=84, start_s=0)
    100.0

    Source: Li et al., "Sync-Switch", ICDCS 2021, Sect. VI-B3 (stragglers that are injected by script; it gives
    how many of them, how often, and a network latency in place of the factor).
    """

    on_s: float
    every_s: float
    slowdown: float
    workers: Selection = 1.0
    at_s: float = 0.0

    def __post_init__(self) -> None:
        check_range("(0, inf)", on_s=self.on_s, slowdown=self.slowdown)
        check_range(f"({self.on_s}, inf)", every_s=self.every_s)
        check_range("[0, inf)", at_s=self.at_s)
        object.__setattr__(self, "workers", _checked(self.workers))

    def affects(self, worker: int, n: int) -> bool:
        """Return whether the worker is one of those with slow periods in a cluster of n."""
        return _selects(self.workers, worker, n)

    def periods(self) -> Iterator[Piece]:
        """Yield the periods without end, normal and slow in turn."""
        for i in count():
            begin_s = self.at_s + i * self.every_s
            yield begin_s, 1.0
            yield begin_s + self.on_s, self.slowdown


@checked_types
@dataclass(frozen=True)
class Transient:
    """Transient stragglers: each worker alternates between normal and slow periods, the first one normal.

    ``share of time being slow = mean_on_s / (mean_on_s + mean_off_s)`` in the long run

    Args:
        mean_on_s: Mean of the exponential length of a slow period, seconds, > 0.
        mean_off_s: Mean of the exponential length of a normal period, seconds, > 0.
        slowdown: How many times slower the worker computes in a slow period, > 0.
        workers: Ids of the workers, or a fraction in (0, 1]: the first ceil(fraction * n) of them.

    Source: Li et al., "Sync-Switch", ICDCS 2021, Sect. IV-B2 and VI (what transient stragglers are; the
    exponential periods are ours, the paper scripts its stragglers).
    """

    mean_on_s: float
    mean_off_s: float
    slowdown: float
    workers: Selection = 1.0

    def __post_init__(self) -> None:
        check_range("(0, inf)", mean_on_s=self.mean_on_s, mean_off_s=self.mean_off_s, slowdown=self.slowdown)
        object.__setattr__(self, "workers", _checked(self.workers))

    def affects(self, worker: int, n: int) -> bool:
        """Return whether the worker is one of those with slow periods in a cluster of n."""
        return _selects(self.workers, worker, n)

    def periods(self, stream: Generator) -> Iterator[Piece]:
        """Yield one worker's periods without end, normal and slow in turn, from its own random stream."""
        end_s = 0.0
        while True:
            end_s += stream.exponential(self.mean_off_s)
            yield end_s, 1.0
            end_s += stream.exponential(self.mean_on_s)
            yield end_s, self.slowdown


class SlownessProfile:
    """One worker's slowness over time: the product of everything that slows it down at a moment.

    Args:
        slowdowns: Those that affect the worker.
        periods: Of its own, besides.

    >>> half_time = SlownessProfile([Slowdown(at_s=10, factor=5, workers=(0,))])
    >>> half_time.duration_s(work_s=3, start_s=8)  # 2 s at full speed, 1 s of work at a fifth of it
    7.0
    """

    def __init__(self, slowdowns: Iterable[Slowdown | Periodic], periods: Iterable[Piece] = ALWAYS_NORMAL) -> None:
        self._coming = _product([iter(periods), *(each.periods() for each in slowdowns)])
        self._pieces = [next(self._coming)]

    def duration_s(self, work_s: float, start_s: float) -> float:
        """Return the seconds taken by ``work_s`` seconds of work at normal speed begun at ``start_s``."""
        elapsed_s = 0.0
        for end_s, slowness in self._from(start_s):
            available_s = end_s - (start_s + elapsed_s)
            if work_s * slowness <= available_s:
                break
            work_s -= available_s / slowness
            elapsed_s += available_s
        return elapsed_s + work_s * slowness

    def _from(self, start_s: float) -> Iterator[Piece]:
        while self._pieces[-1][0] <= start_s:
            self._pieces.append(next(self._coming))
        index = bisect_right(self._pieces, start_s, key=itemgetter(0))
        while True:
            yield self._pieces[index]
            index += 1
            if index == len(self._pieces):
                self._pieces.append(next(self._coming))


def _product(factors: Sequence[Iterator[Piece]]) -> Iterator[Piece]:
    """Yield the pieces of a product of piecewise-constant slownesses; each of them ends at infinity, or never."""
    pieces = [next(factor) for factor in factors]
    while True:
        end_s = min(piece_end_s for piece_end_s, _ in pieces)
        yield end_s, prod(slowness for _, slowness in pieces)
        pieces = [next(factor) if piece[0] <= end_s else piece for factor, piece in zip(factors, pieces, strict=True)]


def _checked(workers: object) -> object:
    if not isinstance(workers, (list, tuple)):
        try:
            check_range("(0, 1]", workers=workers)
        except UsageError as error:
            raise UsageError(f"{error}; or type a list of worker ids: workers=[0, 1]") from error
        return workers
    for worker in workers:
        check_range("[0, inf)", Integral, workers=worker)
    return tuple(workers)


def _selects(workers: Selection, worker: int, n: int) -> bool:
    if isinstance(workers, tuple):
        return worker in workers
    # The small number keeps a fraction like 0.07 of 100, which is 7.000000000000001, from selecting eight.
    return worker < ceil(workers * n - 1e-9)
