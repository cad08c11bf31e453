"""Event log of a run as arrays: tasks, updates and decisions."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.core import records
from paceline.core.events import NO_FAILURES
from paceline.core.stop import LEAST_LOSS_WINDOW, Stop
from paceline.core.targets import Target
from paceline.recording.run_folder import SavedRun
from paceline.recording.run_stats import RunStats, count
from paceline.report.share_totals import ShareTotals, has_shares

FATES = ("used", "dropped", "interrupted", "unfinished")
NO_END = "running, or killed"
Column = NDArray[Any]
Spans = list[tuple[float, float]]
T = TypeVar("T")
Unarrived = records.WorkInterrupted | records.WorkUnfinished

_WHAT = ("worker", "draw", "version", "start_s", "end_s", "staleness", "ending", "samples")
WORK = (*_WHAT, "round_trip_s", "compute_s", "network_s")
UPDATE = ("time_s", "k", "workload", "gradients", "reason", "quorum_reason", "mean_staleness")
RATE = ("time_s", "updates", "scale", "phi")
_REAL = {"scale", "phi", "mean_staleness"}
NO_STALENESS = -1  # value of a task whose gradient never arrived
NO_REASON = -1


class RunEndingData(NamedTuple):
    """End of a task: one of `FATES`, with the reason."""

    fate: str
    reason: str


class Mark(NamedTuple):
    """Decision or event of the whole run, with the number of updates until then."""

    time_s: float
    updates: int
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Data of one run for the report.

    Attributes:
        label: name of the run in the report.
        run: reader of the folder of the run.
        work: columns of the tasks, by worker and then by time; the tasks of one worker do not overlap.
        workers: number of workers that were ever live.
        live: intervals of time in which each worker was live, in seconds.
        losses_of_workers: number of times that each worker was lost.
        waits_s: seconds for which updates waited for their last gradient alone, by its worker.
        updates: columns of the updates; `gradients` counts the used gradients until then.
        losses: losses of the used gradients in the order of their arrival.
        evaluations: records of the evaluations.
        rates: columns of the learning-rate rule "noise": factor on the given rate, and phi; empty under other rules.
        marks: decisions and events of the whole run.
        endings: ends of tasks, numbered by the column `ending` of `work`.
        reasons: reasons, numbered by the columns of reasons of `updates`.
        stats: summary statistics.
        end_s: time of the last record in seconds.
        shares: sums over the updates of a run whose workers share the samples; None for another run.
        memory_sharers: number of workers that shared memory with the server at some time.
    """

    label: str
    run: SavedRun
    work: dict[str, Column]
    workers: int
    live: list[Spans]
    losses_of_workers: list[int]
    waits_s: list[float]
    updates: dict[str, Column]
    losses: Column
    evaluations: list[records.VersionEvaluated]
    rates: dict[str, Column]
    marks: list[Mark]
    endings: list[RunEndingData]
    reasons: list[str]
    stats: RunStats
    end_s: float
    shares: ShareTotals | None = None
    memory_sharers: int = 0

    @property
    def fates(self) -> Column:
        """Index in `FATES` of each task."""
        numbers = np.array([FATES.index(ending.fate) for ending in self.endings], dtype=int)
        return numbers[self.work["ending"]] if len(self.endings) else np.zeros(0, dtype=int)

    @property
    def protocol(self) -> str:
        """Text of the plan."""
        return str(self.run.configuration.get("protocol", "?"))

    @property
    def seed(self) -> Any:
        """Seed of the run; None for a script, which has its own."""
        return self.run.configuration.get("seed")

    @property
    def stop(self) -> Stop | None:
        """Stop conditions of the run, None if its folder has none."""
        text = self.run.configuration.get("stop")
        return Stop.parse(text) if isinstance(text, str) else None

    @property
    def evaluated(self) -> tuple[Target, ...]:
        """Targets of the stop on metrics of evaluations."""
        return self.stop.evaluated if self.stop else ()

    @property
    def outcome(self) -> str:
        """Outcome as a word, or the error, or that the log has no end."""
        if self.has_ended:
            return str(self.stats.stopped_by)
        return f"failed: {self.run.error}" if self.run.error else NO_END

    @property
    def has_ended(self) -> bool:
        """Whether the log has the end of the run."""
        return self.stats.stopped_by is not None

    @property
    def loss_window(self) -> int:
        """Number of gradients in the mean loss of `Stop(loss=)`."""
        return loss_window(self.run)


def loss_window(run: SavedRun) -> int:
    """Return the number of gradients in the mean loss of `Stop(loss=)`."""
    return max(int(run.configuration.get("workers", 1)), LEAST_LOSS_WINDOW)


def read_run(run: SavedRun, label: str) -> RunData:
    """Read the event log of a run in one pass.

    Raises:
        RunError: the log cannot be read.
    """
    reader = RunReader(ShareTotals() if has_shares(run) else None)
    stats = count(reader.read(run.history))
    return reader.data(run, label, stats)


class RunReader:
    """Accumulator of the records of a run.

    Args:
        shares: sums over the updates, if the workers share the samples; else None.

    Attributes:
        shares: these sums.
        work: rows of the tasks in the order of their records, one after the other.
        updates: rows of the updates, one after the other.
        losses: losses of the used gradients in the order of their arrival.
        used: number of used gradients.
        evaluations: records of the evaluations.
        rates: rows of the learning-rate rule, one after the other.
        marks: decisions and events of the whole run.
        endings: number of each end of a task.
        reasons: number of each reason of an update.
        live: intervals of each worker, in seconds; the last one of a live worker ends at infinity.
        losses_of_workers: number of losses of each worker.
        memory_sharers: workers that shared memory with the server at some time.
        waits_s: seconds for which updates waited for their last gradient alone, by its worker.
        now_s: time of the last record, in seconds.
    """

    def __init__(self, shares: ShareTotals | None = None) -> None:
        self.shares = shares
        self.work = array("d")
        self.updates = array("d")
        self.losses = array("d")
        self.used = 0
        self.evaluations: list[records.VersionEvaluated] = []
        self.rates = array("d")
        self.marks: list[Mark] = []
        self.endings: dict[RunEndingData, int] = {}
        self.reasons: dict[str, int] = {}
        self.live: dict[int, Spans] = {}
        self.losses_of_workers: Counter[int] = Counter()
        self.memory_sharers: set[int] = set()
        self.waits_s: defaultdict[int, float] = defaultdict(float)
        self.now_s = 0.0
        self._updates = 0
        self._quorum_reason = NO_REASON
        self._last_used: deque[records.GradientArrived] = deque(maxlen=2)  # of the next update

    def read(self, history: Iterable[records.Record]) -> Iterator[records.Record]:
        """Add the records of a run and yield them unchanged."""
        for record in history:
            self.add(record)
            yield record

    def data(self, run: SavedRun, label: str, stats: RunStats) -> RunData:
        """Return the data of the records so far.

        Args:
            run: reader of the folder of the run.
            label: name of the run in the report.
            stats: statistics of the same records.
        """
        work = sorted_work(columns(self.work, WORK))
        return RunData(
            label=label,
            run=run,
            work=work,
            workers=len(self.live),
            live=self._spans(work),
            losses_of_workers=[self.losses_of_workers[worker] for worker in sorted(self.live)],
            waits_s=[self.waits_s[worker] for worker in sorted(self.live)],
            updates=columns(self.updates, UPDATE),
            losses=np.array(self.losses),
            evaluations=self.evaluations,
            rates=columns(self.rates, RATE),
            marks=self.marks,
            endings=list(self.endings),
            reasons=list(self.reasons),
            stats=stats,
            end_s=self.now_s,
            shares=self.shares,
            memory_sharers=len(self.memory_sharers),
        )

    def _spans(self, work: dict[str, Column]) -> list[Spans]:
        """Return the intervals in which each worker was live, up to its last task where the log has no end."""
        return [
            [(begin_s, self._last_s(work, worker, begin_s) if end_s == inf else end_s) for begin_s, end_s in spans]
            for worker, spans in sorted(self.live.items())
        ]

    def _last_s(self, work: dict[str, Column], worker: int, begin_s: float) -> float:
        return float(work["end_s"][work["worker"] == worker].max(initial=begin_s))

    def add(self, record: records.Record) -> None:
        """Add a record."""
        self.now_s = record.now_s
        if self.shares is not None:
            self.shares.add(record)
        match record:
            case records.GradientArrived():
                self._arrived(record)
            case records.WorkInterrupted():
                ending = self._ending("interrupted", "no longer needed after an update")
                self._never_arrived(record, ending, record.samples)
            case records.WorkUnfinished():
                self._never_arrived(record, self._ending("unfinished", "worker lost, or end of the run"), 0)
            case records.UpdateMade():
                self._updates += 1
                counts = (record.k, record.workload, self.used)
                reasons = (self._reason(record.reason), self._quorum_reason)
                self.updates.extend((record.now_s, *counts, *reasons, record.staleness))
                self._count_wait()
            case records.VersionEvaluated():
                self.evaluations.append(record)
            case records.DecisionMade(kind="quorum"):  # these decisions are shown with the updates
                self._quorum_reason = self._reason(record.reason)
            case records.DecisionMade(kind="learning_rate", numbers=dict(numbers)):
                self.rates.extend((record.now_s, self._updates, numbers["scale"], numbers["phi"]))
            case records.DecisionMade(kind="lead" | "dealt"):
                pass  # as often as updates; the log has them
            case records.DecisionMade():
                if record.kind == "protocol":
                    self._quorum_reason = NO_REASON
                self._mark(record.now_s, record.kind, record.reason)
            case _:
                self._membership(record)

    def forget_unused_texts(self) -> None:
        """Renumber endings and reasons, without those that no row has any more."""
        ending = slice(WORK.index("ending"), None, len(WORK))
        self.endings, numbers = _still_used(self.endings, self.work[ending])
        self.work[ending] = array("d", map(numbers.__getitem__, self.work[ending]))
        places = [slice(UPDATE.index(name), None, len(UPDATE)) for name in ("reason", "quorum_reason")]
        used = [number for place in places for number in self.updates[place]]
        self.reasons, numbers = _still_used(self.reasons, [*used, self._quorum_reason])
        for place in places:
            self.updates[place] = array("d", map(numbers.__getitem__, self.updates[place]))
        self._quorum_reason = numbers[self._quorum_reason]

    def _membership(self, record: records.Record) -> None:
        """Add a record that changes which workers are live, or what they share."""
        match record:
            case records.RunStarted():
                self.live = {worker: [(record.now_s, inf)] for worker in range(record.workers)}
            case records.RunResumed():
                reason = f"resumed at version {record.version}. {record.changes}".strip()
                self._mark(record.now_s, "resumed", reason)
                for worker in range(record.workers):
                    self._join(worker, record.now_s)
                for worker in range(record.workers, len(self.live)):
                    self._leave(worker, record.now_s)
            case records.WorkerJoined():
                if record.late_return and self.live.get(record.worker):  # the worker was live all the time
                    self.losses_of_workers[record.worker] -= 1
                    begin_s, _ = self.live[record.worker].pop()
                    self.live[record.worker].append((begin_s, inf))
                self._join(record.worker, record.now_s)
                change = "returned" if record.late_return else "joined"
                self._mark(record.now_s, "joined", f"worker {record.worker} {change}")
            case records.WorkerLost():
                self.losses_of_workers[record.worker] += record.reason not in NO_FAILURES
                self._leave(record.worker, record.now_s)
                if not record.silent:  # the decision on a silent worker has its own mark
                    self._mark(record.now_s, "lost", f"worker {record.worker}: {record.reason}")
            case records.MemoryShared():
                self.memory_sharers.add(record.worker)
            case records.RunEnded():
                for worker in self.live:
                    self._leave(worker, record.now_s)

    def _arrived(self, record: records.GradientArrived) -> None:
        fate = "used" if record.used else "interrupted" if record.crossed_interrupt else "dropped"
        if record.used:
            self.used += 1
            self.losses.append(record.loss)
            self._last_used.append(record)
        arrived = (record.staleness, self._ending(fate, record.reason), record.samples)
        spent_s = (record.now_s - record.started_s, record.compute_s, record.pull_s + record.push_s)
        self.work.extend((*_where(record), *arrived, *spent_s))

    def _count_wait(self) -> None:
        if len(self._last_used) == 2:
            before, last = self._last_used
            self.waits_s[last.worker] += last.now_s - before.now_s
        self._last_used.clear()

    def _never_arrived(self, record: Unarrived, ending: int, samples: int) -> None:
        self.work.extend((*_where(record), NO_STALENESS, ending, samples, nan, nan, nan))

    def _join(self, worker: int, now_s: float) -> None:
        spans = self.live.setdefault(worker, [])
        if not spans or spans[-1][1] < inf:
            spans.append((now_s, inf))

    def _leave(self, worker: int, now_s: float) -> None:
        spans = self.live.setdefault(worker, [])
        if spans and spans[-1][1] == inf:
            spans[-1] = (spans[-1][0], now_s)

    def _reason(self, reason: str) -> int:
        return self.reasons.setdefault(reason, len(self.reasons))

    def _ending(self, fate: str, reason: str) -> int:
        return self.endings.setdefault(RunEndingData(fate, reason), len(self.endings))

    def _mark(self, time_s: float, kind: str, reason: str) -> None:
        self.marks.append(Mark(time_s=time_s, updates=self._updates, kind=kind, reason=reason))


def _where(work: records.GradientArrived | Unarrived) -> tuple[float, ...]:
    return (work.worker, work.draw, work.version, work.started_s, work.now_s)


def _still_used(texts: dict[T, int], used: Iterable[float]) -> tuple[dict[T, int], dict[float, int]]:
    """Return new numbers of the texts with a used number, and the new number of each used one."""
    kept = {int(number) for number in used}
    renumbered = {text: i for i, text in enumerate(text for text, number in texts.items() if number in kept)}
    return renumbered, {NO_REASON: NO_REASON, **{texts[text]: i for text, i in renumbered.items()}}


def columns(rows: array[float], names: Sequence[str]) -> dict[str, Column]:
    """Split concatenated rows into columns: float for seconds and real numbers, int for all others."""
    table = np.array(rows).reshape(-1, len(names))
    return {
        name: table[:, i].copy() if name.endswith("_s") or name in _REAL else table[:, i].astype(np.int64)
        for i, name in enumerate(names)
    }


def sorted_work(work: dict[str, Column]) -> dict[str, Column]:
    """Order the tasks by worker and draw, with one task per draw.

    Of two records of one draw the later one counts: a gradient that arrived after its task was interrupted. A task ends
    at the start of the worker's next task at the latest.
    """
    order = np.lexsort((np.arange(len(work["worker"])), work["draw"], work["worker"]))
    work = {name: column[order] for name, column in work.items()}
    same_worker = work["worker"][1:] == work["worker"][:-1]
    is_replaced = np.append(same_worker & (work["draw"][1:] == work["draw"][:-1]), False)[: len(order)]
    work = {name: column[~is_replaced] for name, column in work.items()}
    same_worker = work["worker"][1:] == work["worker"][:-1]
    next_start_s = np.append(np.where(same_worker, work["start_s"][1:], inf), inf)[: len(work["end_s"])]
    work["end_s"] = np.minimum(work["end_s"], next_start_s)
    return work
