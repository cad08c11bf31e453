"""History of the round trips of each worker, and the trips that a replay of protocols takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import exp, log, sqrt
from statistics import fmean
from typing import Any, NamedTuple

from paceline.utils.state_dict import Stateful

RECENT = 32  # trips of a worker
OLD = 48
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
    """

    seconds: float
    censored: bool = False


class WorkerTrips(Stateful):
    """Round trips of one worker, and a detector of changes of their times.

    The detector is a two-sided CUSUM of the logarithm of the trip times: with z the deviation from the mean of all
    trips since the latest change, in standard deviations,

        s+ = max(0, s+ + z - 0.75),    s- = max(0, s- - z - 0.75),

    and a sum above 8 is a change. The recent trips then begin where that sum left 0. A third sum detects a worker whose
    work is always cancelled, because it has become slower: with S(c) the share of recent trips longer than c,

        s = max(0, s - log(S(c)) / 2 - (log(2) if the trip is not censored)),

    the logarithm of the likelihood ratio of half as many arrivals.

    Source: Page, "Continuous inspection schemes", 1954.
    """

    _saved = ("_mean", "_square", "_count", "_sums", "_since", "_absence", "_absent", "_retired")

    def __init__(self) -> None:
        self.recent: list[Trip] = []
        self.old: list[Trip] = []
        self._mean = self._square = 0.0
        self._count = 0
        self._sums = (0.0, 0.0)
        self._since = (0, 0)  # trips that are not censored since each sum was 0
        self._absence, self._absent = 0.0, 0  # third sum, and trips since it was 0
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
        has_changed = len(self.recent) >= ENOUGH and self._detect_absence(trip)
        self.recent.append(trip)
        alike = [i for i, each in enumerate(self.recent) if each.censored == trip.censored]
        if len(alike) > RECENT:
            self._retire(self.recent.pop(alike[0]))
        if not trip.censored and trip.seconds > 0:
            has_changed |= self._detect(log(trip.seconds))
        return has_changed

    def _detect_absence(self, trip: Trip) -> bool:
        longer = sum(each.seconds > trip.seconds for each in self.recent)
        surprise = log((1 + len(self.recent)) / (1 + longer)) / 2 - (0.0 if trip.censored else log(2))
        self._absence = max(0.0, self._absence + surprise)
        self._absent = self._absent + 1 if self._absence else 0
        if self._absence <= LARGEST_SUM:
            return False
        self._begin_anew(self._absent)
        return True

    def _retire(self, trip: Trip) -> None:
        if trip.censored and any(each.seconds > trip.seconds for each in self.recent):
            return  # it says nothing about slowness that is rare
        self._retired += 1
        if self._retired % (RECENT // OLD_EVERY) == 0 or len(self.old) < OLD // 4:
            self.old.append(trip)
            del self.old[:-OLD]

    def _detect(self, value: float) -> bool:
        deviation = sqrt(max(self._square - self._mean * self._mean, 0.0))
        if self._count >= ENOUGH:
            z = (value - self._mean) / max(deviation, 0.05)  # times that never vary must not alarm at 1 %
            z = min(max(z, -4.0), 4.0)  # one outlier is no change
            up, down = max(0.0, self._sums[0] + z - SLACK), max(0.0, self._sums[1] - z - SLACK)
            self._sums = (up, down)
            self._since = (self._since[0] + 1 if up else 0, self._since[1] + 1 if down else 0)
            if max(up, down) > LARGEST_SUM:
                self._begin_anew(self._since[0] if up > down else self._since[1])
                return True
        self._count += 1
        weight = 1.0 / self._count
        self._mean += weight * (value - self._mean)
        self._square += weight * (value * value - self._square)
        return False

    def _begin_anew(self, kept: int) -> None:
        """Keep this many of the recent trips, and forget the sums."""
        while len(self.recent) > max(kept, 1):
            self._retire(self.recent.pop(0))
        values = [log(trip.seconds) for trip in self.recent if trip.seconds > 0 and not trip.censored]
        self._count = len(values)
        self._mean, self._square = (fmean(values), fmean(value * value for value in values)) if values else (0.0, 0.0)
        self._sums, self._since = (0.0, 0.0), (0, 0)
        self._absence, self._absent = 0.0, 0


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
        pool = sorted(_completed(every, tail_s))
        old = {worker: self._workers[worker].old if worker in self._workers else () for worker in numbers}
        completed = {worker: _completed(trips, tail_s) for worker, trips in own.items()}
        shrink = _shrinkage(list(completed.values()))
        return [_mixed(_filled(completed[w], pool, shrink), [trip.seconds for trip in old[w]], w) for w in numbers]

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
    return sum(trip.seconds for trip in trips) / sum(not trip.censored for trip in trips)


def _completed(trips: Sequence[Trip], tail_s: float) -> list[float]:
    """Return the seconds of trips, in their order: of a censored one those of a longer one, or an exponential tail."""
    if sum(not trip.censored for trip in trips) >= ENOUGH // 2:
        tail_s = _mean_s(trips)
    seconds = [trip.seconds for trip in trips]
    longer: list[float] = []  # than the trip in hand, from the longest on
    for i in sorted(range(len(trips)), key=lambda i: (-trips[i].seconds, trips[i].censored)):
        if trips[i].censored:
            spread = (i + 1) * GOLDEN % 1.0  # evenly spread in [0, 1), without random draws
            seconds[i] = longer[int(spread * len(longer))] if longer else seconds[i] - tail_s * log(1.0 - spread)
        longer.append(seconds[i])
    return seconds


def _shrinkage(workers: list[list[float]]) -> tuple[float, float, float]:
    """Return the mean of the logarithms of trips, and their variance within and between workers."""
    logs = [[log(max(each, 1e-12)) for each in seconds] for seconds in workers if seconds]
    means = [fmean(each) for each in logs]
    total = fmean(means)
    freedom = sum(len(each) - 1 for each in logs)
    within = sum((value - mean) ** 2 for each, mean in zip(logs, means, strict=True) for value in each)
    within = within / freedom if freedom else 1.0
    if len(means) < 2:
        return total, within, 0.0
    spread = sum((mean - total) ** 2 for mean in means) / (len(means) - 1)
    between = max(0.0, spread - within * fmean(1.0 / len(each) for each in logs))
    return total, within, between


def _filled(own: list[float], pool: list[float], shrinkage: tuple[float, float, float]) -> list[float]:
    """Return the trips of a worker, with trips of the others at its speed if it has fewer than eight."""
    missing = ENOUGH - len(own)
    if missing <= 0:
        return own
    total, within, between = shrinkage
    speed = 1.0
    if own and between > 0:
        trust = between / (between + within / len(own))
        speed = exp(trust * (fmean(log(max(each, 1e-12)) for each in own) - total))
    first = len(own) * GOLDEN % 1.0
    others = [pool[int(((i + 1) * GOLDEN + first) % 1.0 * len(pool))] * speed for i in range(missing)]
    return own + others


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
