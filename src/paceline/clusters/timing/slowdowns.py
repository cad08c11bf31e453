"""Slowdowns of simulated workers: piecewise-constant slowness over virtual time."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from math import ceil, inf, prod
from numbers import Integral
from operator import itemgetter

from numpy.random import Generator

from paceline.errors import UsageError
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.validation import check_range

Selection = tuple[int, ...] | float
Piece = tuple[float, float]
"""End of an interval in seconds, and the factor on compute times until then."""

ALWAYS_NORMAL: tuple[Piece, ...] = ((inf, 1.0),)


class _OfSomeWorkers:
    """Property of selected workers."""

    workers: Selection

    def affects(self, worker: int, n: int) -> bool:
        """Return whether a worker is selected in a cluster of n."""
        if isinstance(self.workers, tuple):
            return worker in self.workers
        # The tolerance is for fractions such as 0.07 of 100, which is 7.000000000000001 and must not select eight.
        return worker < ceil(self.workers * n - 1e-9)


@checked_dataclass(frozen=True, kw_only=True)
class Slowdown(_OfSomeWorkers):
    """Slowdown of some workers by ``factor`` from ``at_s`` until ``until_s``.

    Args:
        at_s: virtual second of the beginning, >= 0.
        factor: factor on compute times, > 0; below 1 the workers become faster.
        workers: ids of the workers, >= 0, or a fraction in (0, 1]: the first ceil(fraction * n) workers.
        until_s: virtual second of the end, > at_s, may be inf.

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

    def periods(self) -> Iterator[Piece]:
        """Yield the interval before, the slow interval, and the one after."""
        yield self.at_s, 1.0
        yield self.until_s, self.factor
        yield inf, 1.0


@checked_dataclass(frozen=True, kw_only=True)
class Periodic(_OfSomeWorkers):
    """Periodic slowdown of some workers: from ``at_s`` on, slow for ``on_s`` in every ``every_s`` seconds.

    ``work done in a whole period = every_s - on_s + on_s / slowdown`` seconds of work at normal speed

    For workers that are slow at different times, give several of these with different ``at_s``.

    Args:
        on_s: length of a slow period in seconds, > 0.
        every_s: time between the beginnings of two slow periods in seconds, > on_s.
        slowdown: factor on compute times in a slow period, > 0.
        workers: ids of the workers, >= 0, or a fraction in (0, 1]: the first ceil(fraction * n) workers.
        at_s: virtual second of the first slow period, >= 0.

    >>> SlownessProfile([Periodic(on_s=20, every_s=100, slowdown=5)]).duration_s(work_s=84, start_s=0)
    100.0

    Source: Li et al., "Sync-Switch", ICDCS 2021, Sect. VI-B3 (scripted stragglers; the paper gives their
    number, their frequency, and a network latency in place of the factor).
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

    def periods(self) -> Iterator[Piece]:
        """Yield an endless sequence of intervals, normal and slow in turn."""
        for i in count():
            begin_s = self.at_s + i * self.every_s
            yield begin_s, 1.0
            yield begin_s + self.on_s, self.slowdown


@checked_dataclass(frozen=True, kw_only=True)
class Transient(_OfSomeWorkers):
    """Random transient stragglers: each worker alternates between normal and slow periods, the first one normal.

    ``share of slow time = mean_on_s / (mean_on_s + mean_off_s)`` in the long run

    Args:
        mean_on_s: mean length of a slow period in seconds, exponential, > 0.
        mean_off_s: mean length of a normal period in seconds, exponential, > 0.
        slowdown: factor on compute times in a slow period, > 0.
        workers: ids of the workers, >= 0, or a fraction in (0, 1]: the first ceil(fraction * n) workers.

    Source: Li et al., "Sync-Switch", ICDCS 2021, Sect. IV-B2 and VI (definition of transient stragglers). Differs: the
    periods are exponential; the paper scripts its stragglers.
    """

    mean_on_s: float
    mean_off_s: float
    slowdown: float
    workers: Selection = 1.0

    def __post_init__(self) -> None:
        check_range("(0, inf)", mean_on_s=self.mean_on_s, mean_off_s=self.mean_off_s, slowdown=self.slowdown)
        object.__setattr__(self, "workers", _checked(self.workers))

    def periods(self, stream: Generator) -> Iterator[Piece]:
        """Yield an endless sequence of intervals of one worker, normal and slow in turn, from its random stream."""
        end_s = 0.0
        while True:
            end_s += stream.exponential(self.mean_off_s)
            yield end_s, 1.0
            end_s += stream.exponential(self.mean_on_s)
            yield end_s, self.slowdown


class SlownessProfile:
    """Slowness profile of one worker: the product of its slowdowns over virtual time.

    Args:
        slowdowns: slowdowns that affect the worker.
        periods: further intervals of the worker; normal speed if not given.

    >>> half_time = SlownessProfile([Slowdown(at_s=10, factor=5, workers=(0,))])
    >>> half_time.duration_s(work_s=3, start_s=8)  # 2 s at full speed, 1 s of work at a fifth of it
    7.0
    """

    def __init__(self, slowdowns: Iterable[Slowdown | Periodic], periods: Iterable[Piece] = ALWAYS_NORMAL) -> None:
        self._coming = _product([iter(periods), *(each.periods() for each in slowdowns)])
        self._pieces = [next(self._coming)]

    def duration_s(self, work_s: float, start_s: float) -> float:
        """Return the seconds of ``work_s`` seconds of work at normal speed, started at second ``start_s``."""
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
    """Yield the product of piecewise-constant slownesses; each of them ends at infinity, or is endless."""
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
            raise UsageError(f"{error}; or give a list of worker ids, for example workers=[0, 1]") from error
        return workers
    for worker in workers:
        check_range("[0, inf)", Integral, workers=worker)
    return tuple(workers)
