"""Updates of ranks that share samples, with the work and the time of each rank: from a log, and as its records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import nan
from typing import NamedTuple

from paceline.core.records import DecisionMade, GradientArrived, Record, RunResumed, UpdateMade

DEALT = "dealt"  # kind of the decision with the work of each rank, where it is not the number of samples
EQUAL = "equal {}"  # name of the work of a rank with equal shares
WHY = "all ranks are done"


class TimedUpdate(NamedTuple):
    """Update of ranks that share its samples; the lists have an entry for each of its ranks.

    Attributes:
        began_s: time at which the sums of the update before ended, in seconds since the run began.
        ended_s: time at which its own sums ended.
        ranks: numbers of the ranks.
        samples: samples of each rank.
        seconds: seconds of each rank without waiting for others; 0 for a time that was not measured.
        work: samples of each rank, or their cost.
        equal_work: the same with equal shares.
    """

    began_s: float
    ended_s: float
    ranks: Sequence[int]
    samples: Sequence[int]
    seconds: Sequence[float]
    work: Sequence[float]
    equal_work: Sequence[float]

    @property
    def waiting_s(self) -> list[float]:
        """Seconds for which each rank waited for the slowest one; 0 where a time was not measured."""
        longest_s = max(self.seconds)
        return [longest_s - each if each else 0.0 for each in self.seconds]


class TimedUpdates:
    """Reader of the updates in a log, record by record."""

    def __init__(self) -> None:
        self._used: dict[int, GradientArrived] = {}
        self._dealt: DecisionMade | None = None

    def add(self, record: Record) -> TimedUpdate | None:
        """Add a record; return the update that it ends, if it ends one."""
        match record:
            case GradientArrived(used=True, worker=worker):
                earlier = self._used.get(worker)
                self._used[worker] = record if earlier is None else _together(earlier, record)
            case RunResumed():
                self._used = {}
                self._dealt = None
            case DecisionMade(kind="dealt"):
                self._dealt = record
            case UpdateMade():
                return self._update(record.now_s)
        return None

    def _update(self, ended_s: float) -> TimedUpdate:
        self._used = dict(sorted(self._used.items()))
        used, numbers = self._used.items(), dict(self._dealt.numbers or {}) if self._dealt else {}
        samples = [record.samples for _, record in used]
        equal = sum(samples) / len(samples)
        update = TimedUpdate(
            began_s=min(record.started_s for _, record in used),
            ended_s=ended_s,
            ranks=[*self._used],
            samples=samples,
            seconds=[record.compute_s for _, record in used],
            work=[numbers.get(str(rank), record.samples) for rank, record in used],
            equal_work=[numbers.get(EQUAL.format(rank), equal) for rank, _ in used],
        )
        self._used = {}
        self._dealt = None
        return update


def _together(earlier: GradientArrived, record: GradientArrived) -> GradientArrived:
    """Return two leases of a worker in an update as one."""
    return replace(
        record,
        started_s=earlier.started_s,
        samples=earlier.samples + record.samples,
        compute_s=earlier.compute_s + record.compute_s,
    )


def timed_updates(history: Iterable[Record]) -> Iterator[TimedUpdate]:
    """Yield the updates in a log."""
    reader = TimedUpdates()
    for record in history:
        update = reader.add(record)
        if update is not None:
            yield update


class UpdateRecords:
    """Writer of such updates as records.

    A rank's gradient arrives after its own work and the sums, so the wait for the slowest rank is idle time.

    Attributes:
        version: number of updates so far.
        workload: number of gradients so far.
        busy_s: rank-seconds of work and sums so far.
        live_s: rank-seconds so far.
    """

    def __init__(self) -> None:
        self.version = self.workload = 0
        self.busy_s = self.live_s = 0.0

    def follow(self, update: UpdateMade) -> None:
        """Continue after an update of the same log."""
        self.version = update.version
        self.workload = update.workload
        self.busy_s = update.busy_s
        self.live_s = update.live_s

    def of(self, update: TimedUpdate) -> Iterator[Record]:
        """Yield the records of the next update."""
        began_s, ended_s = update.began_s, update.ended_s
        count, total = len(update.ranks), sum(update.samples)
        sum_s = max(0.0, ended_s - began_s - max(update.seconds))
        rows = zip(update.waiting_s, update.ranks, update.samples, update.seconds, strict=True)
        arrivals = sorted(
            (max(began_s, ended_s - waiting_s), rank, samples, seconds) for waiting_s, rank, samples, seconds in rows
        )
        for now_s, rank, samples, seconds in arrivals:
            yield GradientArrived(
                now_s=now_s,
                worker=rank,
                draw=self.version + 1,
                version=self.version,
                started_s=began_s,
                staleness=0,
                used=True,
                reason="",
                loss=nan,
                samples=samples,
                squared_norm=nan,
                pull_s=0.0,
                compute_s=seconds,
                push_s=sum_s,
                event_s=now_s,
                sum_s=sum_s,
            )
        if [*update.work] != [*update.samples] or {*update.equal_work} != {total / count}:
            numbers = {str(rank): float(each) for rank, each in zip(update.ranks, update.work, strict=True)}
            equal = zip(update.ranks, update.equal_work, strict=True)
            numbers |= {EQUAL.format(rank): float(each) for rank, each in equal}
            yield DecisionMade(
                now_s=ended_s, kind=DEALT, reason="work of each rank, and with equal shares", numbers=numbers
            )
        self.version += 1
        self.workload += count
        self.busy_s += sum(now_s - began_s for now_s, *_ in arrivals)
        self.live_s += count * (ended_s - began_s)
        yield UpdateMade(
            now_s=ended_s,
            version=self.version,
            k=count,
            workload=self.workload,
            samples=total,
            loss=nan,
            learning_rate=nan,
            staleness=0.0,
            max_staleness=0,
            reason=WHY,
            busy_s=self.busy_s,
            live_s=self.live_s,
        )
