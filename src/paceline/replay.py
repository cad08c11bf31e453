"""A run's own arrivals once more through a coordinator, to see whether it decides the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from paceline.callbacks.base import Memory
from paceline.coordinator import NOT_FINITE, Coordinator
from paceline.errors import UsageError
from paceline.events import (
    Applied,
    Arrival,
    Compensation,
    Evaluated,
    Event,
    Joined,
    Lost,
    Outcome,
    Restarted,
    Stop,
    Timer,
)
from paceline.history import (
    DecisionMade,
    GradientArrived,
    Record,
    RunEnded,
    RunResumed,
    RunStarted,
    StepMeasured,
    TimerRang,
    UpdateMade,
    VersionEvaluated,
    WorkerJoined,
    WorkerLost,
    WorkInterrupted,
)
from paceline.protocols import Phase, Plan, Protocol, as_plan
from paceline.recording.event_log import to_line
from paceline.recording.recorder import Recorder
from paceline.recording.run_folder import SavedRun
from paceline.rules import make_coordinator, plan_of
from paceline.shown import Shown
from paceline.stop import Stop as StopRule

DECISIONS = (UpdateMade, DecisionMade, GradientArrived, WorkInterrupted)
FROM_OUTSIDE = {Outcome.INTERRUPTED, Outcome.NO_WORKERS, Outcome.FAILED}


@dataclass(frozen=True, repr=False)
class Replay(Shown):
    """What a replay has shown.

    Attributes:
        updates: made in the log.
        decisions: in the log: updates, what was used and dropped, interrupts, changes of protocol, quorum, membership.
        difference: where log and replay first differ, in words; empty if nowhere.
    """

    updates: int
    decisions: int
    difference: str

    @property
    def is_same(self) -> bool:
        """Whether every decision was the same."""
        return not self.difference

    def _facts(self) -> Mapping[str, object]:
        facts = {"is_same": self.is_same, "updates": self.updates, "decisions": self.decisions}
        return facts if self.is_same else {**facts, "difference": self.difference}


def replay(run: str | Path, protocol: Protocol | Phase | Plan | None = None) -> Replay:
    """Feed a run's own events to a coordinator and compare what it decides with what was decided.

    The events are those of the log, with their times, losses and norms. Minibatches are numbers here, and no
    gradient is computed.

    Args:
        run: folder of the run.
        protocol: that the run had, or its plan; needed only if it had controllers.

    Raises:
        UsageError: there is no run, or it cannot be replayed.
        RunError: its log cannot be read.
    """
    saved = SavedRun(run)
    resumed = saved.history.of(RunResumed)
    _refuse_changes(saved.path, resumed)
    replayed = _Replayed(
        plan_of(saved.configuration["plan"]) if protocol is None else _checked(protocol, saved),
        [StopRule.parse(text) for text in (*(record.stop_before for record in resumed), saved.configuration["stop"])],
        saved.configuration,
    )
    updates = decisions = 0
    for record, after in pairwise(chain(saved.history, [None])):
        assert record is not None
        if isinstance(record, VersionEvaluated) and isinstance(after, RunEnded):
            continue  # of the last version, when all was decided
        updates += isinstance(record, UpdateMade)
        decisions += isinstance(record, DECISIONS)
        difference = replayed.difference(record)
        if difference:
            break
    else:
        difference = replayed.left_over()
    return Replay(updates, decisions, f"after {updates} updates: {difference}" if difference else "")


class _Replayed:
    """A coordinator with its books, beside a log that is read."""

    def __init__(self, plan: Plan, stops: Sequence[StopRule], configuration: Mapping[str, Any]) -> None:
        self._plan = plan
        self._stops = iter(stops)
        self._rules = configuration["rules"]
        self._coordinator = self._next_coordinator()
        self._memory = Memory()
        n, batch_size = configuration["workers"], configuration["batch_size"]
        self._recorder = Recorder(n, batch_size, "", lambda: 0.0, [self._memory])
        self._logged: deque[Record] = deque()  # read, and not yet compared
        self._end = ""  # why the coordinator ended the run

    def difference(self, record: Record) -> str:
        """Take in the next record of the log; return what is not the same in the replay, if anything."""
        if isinstance(record, RunEnded):
            return self._compared_end(record)
        self._logged.append(record)
        found = self._compared()
        if not found and self._logged and self._feed(record):
            found = self._compared() or self.left_over()
        return found

    def left_over(self) -> str:
        """Return which decision of the log the replay has not made, if any."""
        missed = next((record for record in self._logged if isinstance(record, DECISIONS)), None)
        return f"the log has {missed}, the replay has not" if missed else ""

    def _compared(self) -> str:
        """Compare what was read and what was made, as far as there are both."""
        made = self._memory.records
        while self._logged and made:
            ours, theirs = self._logged.popleft(), made.pop(0)
            if _comparable(ours) != _comparable(theirs):
                return f"the log has {ours}, the replay has {theirs}"
        return ""

    def _compared_end(self, record: RunEnded) -> str:
        if record.reason == self._end or (not self._end and record.outcome in FROM_OUTSIDE):
            return self.left_over()
        return f"the log ends because {record.reason}, the replay {f'because {self._end}' if self._end else 'goes on'}"

    def _feed(self, record: Record) -> bool:
        """Hand in the event that the record tells of; return whether it is one."""
        match record:
            case RunStarted():
                self._recorder.observe(record.now_s, None, self._coordinator.begin(record.now_s))
                return True
            case RunResumed():
                state = self._coordinator.state_dict()
                self._coordinator = self._next_coordinator()
                self._coordinator.load_state_dict(state)
        event = _event(record)
        if event is None or (self._coordinator.stopped and not isinstance(event, Restarted)):
            return False
        commands = self._coordinator.handle(event)
        self._recorder.observe(record.now_s, event, commands)
        self._end = next((command.reason for command in commands if isinstance(command, Stop)), "")
        return True

    def _next_coordinator(self) -> Coordinator:
        return make_coordinator(self._plan, next(self._stops), self._rules)


def _checked(given: Protocol | Phase | Plan, saved: SavedRun) -> Plan:
    rules, stop = saved.configuration["rules"], StopRule.parse(saved.configuration["stop"])
    per_epoch = rules["per_epoch"]
    plan = as_plan(given).checked(rules["workers"], total=stop.workload(per_epoch), per_epoch=per_epoch)
    if str(plan) != saved.configuration["protocol"]:
        raise UsageError(f"{saved.path} ran {saved.configuration['protocol']}, given {plan}; expected the same plan")
    return plan


def _event(record: Record) -> Event | None:
    """Return the event that this record tells of; None for one that tells of a decision."""
    match record:
        case GradientArrived():
            return Arrival(
                now=record.event_s,
                worker=record.worker,
                draw=record.draw,
                loss=record.loss,
                samples=record.samples,
                squared_norm=record.squared_norm,
                finite=record.reason != NOT_FINITE,
                pull_s=record.pull_s,
                compute_s=record.compute_s,
                push_s=record.push_s,
                variance=record.variance,
                step_scale=record.step_scale,
                compensations=tuple(Compensation(*each) for each in record.compensations),
                sum_s=record.sum_s,
                left_over_s=record.left_over_s,
            )
        case StepMeasured():
            return Applied(record.event_s, record.version, record.step)
        case RunResumed():
            return Restarted(record.now_s, record.workers, record.stop_before)
        case TimerRang():
            return Timer(record.event_s)
        case VersionEvaluated():
            return Evaluated(record.event_s, record.version, record.metrics)
        case WorkerJoined(late_return=False):
            return Joined(record.event_s, record.worker)
        case WorkerLost(silent=False):
            return Lost(record.event_s, record.worker, record.reason)
    return None


def _comparable(record: Record) -> bytes:
    """Return a record without what no coordinator knows; as text, because nan is not equal to itself."""
    if isinstance(record, UpdateMade):
        record = replace(record, learning_rate=0.0)
    elif isinstance(record, RunStarted):
        record = replace(record, memory="")
    return to_line(record)


def _refuse_changes(path: Path, resumed: Sequence[RunResumed]) -> None:
    for record in resumed:
        if record.changes:
            raise UsageError(
                f"{path} was resumed with changes at update {record.version} ({record.changes}); only a run under "
                "one plan on one cluster can be replayed"
            )
