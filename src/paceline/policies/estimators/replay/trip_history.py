"""History of the round trips of each worker, and the trips that a replay of protocols takes."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from math import exp, log, sqrt
from statistics import fmean
from typing import Any, NamedTuple

from paceline.utils.state_dict import Stateful

RECENT = 32  # completed trips of a worker, and as many cancelled ones
OLD = 48
RETIRED_EVERY = 3  # one of so many trips that are recent no more is kept
OLD_EVERY = 10  # one of so many replayed trips is an old one
ENOUGH = 8  # own trips of a worker; with fewer it also gets trips of the others
LARGEST_SUM = 8.0  # of standardized deviations, at which the times of a worker have changed
SLACK = 0.75
GOLDEN = (sqrt(5) - 1) / 2


class Trip(NamedTuple):
    """Round trip of a worker.

    Attributes:
        seconds: from the assignment of the work to its arrival, or to its end.
        censored: whether the work was cancelled before it arrived, so that its trip is longer.
        number: number of the trip among those of its worker; 0 if it is not recorded yet.
        weight: number of cancelled trips that it stands for.
    """

    seconds: float
    censored: bool = False
    number: int = 0
    weight: int = 1


class WorkerTrips(Stateful):
    """Round trips of one worker, and a detector of changes of their times.

    The recent trips are the latest 32 that were completed, and all that were cancelled since the first of them. At most
    32 of these are stored; each stands for the cancelled ones shortly before it.

    The detector is a two-sided CUSUM of the logarithm of the trip times: with z the deviation from the mean of all
    trips since the latest change, in standard deviations,

        s+ = max(0, s+ + z - 0.75),    s- = max(0, s- - z - 0.75),

    and a sum above 8 is a change. The recent trips then begin where that sum left 0. A third sum detects a worker whose
    work is always cancelled, because it has become slower: with H(c) the cumulative hazard at the time c of the trip,

        s = max(0, s + 3 / 4 H(c) - (log(4) if the trip is not censored)),

    the logarithm of the likelihood ratio of a quarter of the hazard. H is the Nelson-Aalen estimate from the
    recent trips before s left 0.

    Source: Page, "Continuous inspection schemes", 1954.
    """

    _saved = ("_mean", "_square", "_count", "_sums", "_since", "_absence", "_absent_since", "_number", "_retired")

    def __init__(self) -> None:
        self.recent: list[Trip] = []
        self.old: list[Trip] = []
        self._mean = self._square = 0.0
        self._count = 0
        self._sums = (0.0, 0.0)
        self._since = (1, 1)  # number of the first trip after each sum was 0
        self._absence = 0.0  # the third sum
        self._absent_since = 1
        self._number = 0
        self._retired = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {**super().state_dict(), "recent": list(map(tuple, self.recent)), "old": list(map(tuple, self.old))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        super().load_state_dict(state)
        self.recent, self.old = ([Trip(*trip) for trip in state[name]] for name in ("recent", "old"))

    def add(self, trip: Trip) -> bool:
        """Add a trip; return whether the times have changed."""
        self._number += 1
        has_changed = self._detect_absence(trip)
        self.recent.append(trip._replace(number=self._number))
        self._limit()
        if not trip.censored and trip.seconds > 0:
            has_changed |= self._detect(log(trip.seconds))
        return has_changed

    def _limit(self) -> None:
        """Keep as many trips of each kind as are stored."""
        cancelled = [i for i, each in enumerate(self.recent) if each.censored]
        if len(cancelled) > RECENT:
            weights = [self.recent[i].weight for i in cancelled]
            _, first = min((sum(pair), i) for i, pair in enumerate(pairwise(weights)))
            i, j = cancelled[first], cancelled[first + 1]
            self.recent[j] = self.recent[j]._replace(weight=weights[first] + weights[first + 1])
            del self.recent[i]
        completed = [i for i, each in enumerate(self.recent) if not each.censored]
        if len(completed) > RECENT:
            self._forget(completed[1])

    def _forget(self, count: int) -> None:
        """Retire the first trips."""
        forgotten, self.recent = self.recent[:count], self.recent[count:]
        for trip in forgotten:
            self._retire(trip)

    def _detect_absence(self, trip: Trip) -> bool:
        before = [each for each in self.recent if each.number < self._absent_since]
        if sum(not each.censored for each in before) < ENOUGH:
            self._absence = 0.0
            self._absent_since = self._number + 1
            return False
        surprise = _hazard(before, trip.seconds) * 3 / 4 - (0.0 if trip.censored else log(4))
        self._absence = max(0.0, self._absence + surprise)
        if not self._absence:
            self._absent_since = self._number + 1
        if self._absence <= LARGEST_SUM:
            return False
        self._begin_anew(self._absent_since)
        return True

    def _retire(self, trip: Trip) -> None:
        before = self._retired // RETIRED_EVERY
        self._retired += trip.weight
        if self._retired // RETIRED_EVERY > before or len(self.old) < OLD // 4:
            self.old.append(trip)
            del self.old[:-OLD]

    def _detect(self, value: float) -> bool:
        deviation = sqrt(max(self._square - self._mean * self._mean, 0.0))
        if self._count >= ENOUGH:
            z = (value - self._mean) / max(deviation, 0.05)  # times that never vary must not alarm at 1 %
            z = min(max(z, -4.0), 4.0)  # one outlier is no change
            up, down = max(0.0, self._sums[0] + z - SLACK), max(0.0, self._sums[1] - z - SLACK)
            self._sums = (up, down)
            after = self._number + 1
            self._since = (self._since[0] if up else after, self._since[1] if down else after)
            if max(up, down) > LARGEST_SUM:
                self._begin_anew(self._since[0] if up > down else self._since[1])
                return True
        self._count += 1
        weight = 1.0 / self._count
        self._mean += weight * (value - self._mean)
        self._square += weight * (value * value - self._square)
        return False

    def _begin_anew(self, first: int) -> None:
        """Keep the trips from this number on, and forget the sums."""
        self._forget(sum(each.number < first for each in self.recent))
        values = [log(trip.seconds) for trip in self.recent if trip.seconds > 0 and not trip.censored]
        self._count = len(values)
        self._mean, self._square = (fmean(values), fmean(value * value for value in values)) if values else (0.0, 0.0)
        after = self._number + 1
        self._sums = (0.0, 0.0)
        self._since = (after, after)
        self._absence = 0.0
        self._absent_since = after


class TripHistory:
    """Round trips of all workers."""

    def __init__(self) -> None:
        self._workers: dict[int, WorkerTrips] = {}

    def add(self, worker: int, trip: Trip) -> bool:
        """Add a trip of a worker; return whether its times have changed."""
        return self._workers.setdefault(worker, WorkerTrips()).add(trip)

    def table(self, workers: Iterable[int], elapsed_s: Mapping[int, float]) -> list[list[float]]:
        """Return trips to replay for each of these workers, in seconds, one or more.

        Recent trips come in their order, and one in ten is an old one: slowness that is rare must not be forgotten.
        Work that was cancelled takes a longer trip of the same worker, or else an exponential time more. A worker with
        fewer than eight trips also gets trips of the others, at its own speed as far as that is known.

        Source: Efron, "The two sample problem with censored data", 1967 (redistribution to the right).

        Args:
            workers: numbers of the workers.
            elapsed_s: seconds since the work in flight was assigned, by worker.
        """
        numbers = list(workers)
        own: dict[int, list[Trip]] = {}
        for worker in numbers:
            trips = list(self._workers[worker].recent) if worker in self._workers else []
            if worker in elapsed_s and (not trips or elapsed_s[worker] > max(trip.seconds for trip in trips)):
                trips.append(Trip(elapsed_s[worker], censored=True))
            own[worker] = trips
        every = list(chain(*own.values()))
        if all(trip.censored for trip in every):
            return [[1.0] for _ in numbers]
        tail_s = _mean_s(every)
        completed = {worker: _completed(own[worker], tail_s, i) for i, worker in enumerate(numbers)}
        levels = dict(zip(numbers, _levels(list(completed.values())), strict=True))
        pool = sorted(seconds / levels[worker] for worker in numbers for seconds in completed[worker])
        table = []
        for worker in numbers:
            recent = _filled(completed[worker], pool, levels[worker])
            old = self._workers[worker].old if worker in self._workers else ()
            table.append(_mixed(recent, [_longer(trip, recent) for trip in old], worker))
        return table

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return the trips of all workers."""
        return {worker: trips.state_dict() for worker, trips in self._workers.items()}

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore such a state."""
        self._workers = {}
        for worker, saved in state.items():
            self._workers[worker] = WorkerTrips()
            self._workers[worker].load_state_dict(saved)


def _mean_s(trips: Sequence[Trip]) -> float:
    """Return the mean of trips of which some are censored, as if they were exponential, at least one of them not."""
    return sum(trip.weight * trip.seconds for trip in trips) / sum(not trip.censored for trip in trips)


def _hazard(trips: Sequence[Trip], seconds: float) -> float:
    """Return the cumulative hazard of round trips at a time, the Nelson-Aalen estimate with one more trip at risk."""
    hazard, left = 0.0, 1 + sum(trip.weight for trip in trips)
    at_risk, at_s = left, 0.0
    for trip in sorted(trips):
        if trip.seconds > seconds:
            break
        if trip.seconds > at_s:
            at_risk, at_s = left, trip.seconds
        if not trip.censored:
            hazard += 1.0 / at_risk
        left -= trip.weight
    return hazard


def _completed(trips: Sequence[Trip], tail_s: float, number: int) -> list[float]:
    """Return the seconds of trips, in their order, each as often as its weight says, 64 or a few more in all.

    A censored trip takes the seconds of a longer one. Those that are longer than every completed trip have an
    exponential tail.

    Args:
        trips: round trips of a worker.
        tail_s: mean of that tail, if the worker has few trips.
        number: number of the worker; workers with the same trips get different tails.
    """
    if sum(not trip.censored for trip in trips) >= ENOUGH // 2:
        tail_s = _mean_s(trips)
    longest_s = max((trip.seconds for trip in trips if not trip.censored), default=0.0)
    step = max(1.0, sum(trip.weight for trip in trips) / (2 * RECENT))
    ends = [int(end / step) for end in accumulate((trip.weight for trip in trips), initial=0)]
    seconds: list[list[float]] = [[] for _ in trips]
    longer: list[float] = []  # from the longest on, with the sums of their weights
    sums: list[float] = []
    draws = 2 * RECENT * number
    for i in sorted(range(len(trips)), key=lambda i: (-trips[i].seconds, trips[i].censored)):
        trip = trips[i]
        copies = ends[i + 1] - ends[i]
        seconds[i] = [trip.seconds] * max(1, copies)
        if trip.censored:
            for copy in range(len(seconds[i])):
                draws += 1
                spread = draws * GOLDEN % 1.0  # evenly spread in [0, 1), without random draws
                if trip.seconds >= longest_s:
                    seconds[i][copy] -= tail_s * log(1.0 - spread)
                else:
                    seconds[i][copy] = longer[bisect(sums, spread * sums[-1])]
        for value in seconds[i]:
            longer.append(value)
            sums.append((sums[-1] if sums else 0.0) + trip.weight / len(seconds[i]))
        del seconds[i][copies:]
    return list(chain(*seconds))


def _levels(workers: Sequence[Sequence[float]]) -> list[float]:
    """Return the geometric mean of the trips of each worker, the nearer to that of all the fewer trips it has.

    Source: Efron and Morris, "Stein's estimation rule and its competitors", 1973.
    """
    logs = [[log(max(each, 1e-12)) for each in seconds] for seconds in workers]
    known = [each for each in logs if each]
    means = [fmean(each) for each in known]
    total = fmean(means)
    freedom = sum(len(each) - 1 for each in known)
    within = sum((value - mean) ** 2 for each, mean in zip(known, means, strict=True) for value in each)
    within = within / freedom if freedom else 1.0
    between = 0.0
    if len(means) > 1:
        spread = sum((mean - total) ** 2 for mean in means) / (len(means) - 1)
        between = max(0.0, spread - within * fmean(1.0 / len(each) for each in known))
    levels = []
    for each in logs:
        trust = between / (between + within / len(each)) if each and between > 0 else 0.0
        levels.append(exp(total + trust * (fmean(each or [total]) - total)))
    return levels


def _filled(own: list[float], pool: list[float], level: float) -> list[float]:
    """Return the trips of a worker, with trips of a pool if it has fewer than eight.

    Args:
        own: its trips.
        pool: trips of all workers, each divided by the level of its worker.
        level: level of this worker.
    """
    missing = ENOUGH - len(own)
    first = len(own) * GOLDEN % 1.0
    return own + [level * pool[int(((i + 1) * GOLDEN + first) % 1.0 * len(pool))] for i in range(missing)]


def _longer(trip: Trip, recent: Sequence[float]) -> float:
    """Return the seconds of a trip, of a censored one those of a longer recent trip if there is one."""
    longer = [seconds for seconds in recent if seconds > trip.seconds] if trip.censored else ()
    return longer[int(trip.number * GOLDEN % 1.0 * len(longer))] if longer else trip.seconds


def _mixed(recent: list[float], old: list[float], worker: int) -> list[float]:
    """Return the recent trips with an old one before every ninth; workers with the same trips take different ones."""
    if not old:
        return recent
    mixed = []
    for i, seconds in enumerate(recent):
        if i % (OLD_EVERY - 1) == worker % (OLD_EVERY - 1):
            mixed.append(old[int((i + worker) * GOLDEN % 1.0 * len(old))])
        mixed.append(seconds)
    return mixed
