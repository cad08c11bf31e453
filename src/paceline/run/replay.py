"""Deterministic replay: the logged events of a run through a coordinator, with a check of every decision."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from paceline.coordinator.coordinator import Coordinator
from paceline.core import records
from paceline.core.events import Command, EndRun, Outcome, Restarted
from paceline.core.stop import Stop as StopRule
from paceline.errors import UsageError
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import Phase, Plan, Protocol, as_plan
from paceline.recording.callback import Memory
from paceline.recording.event_log import to_line
from paceline.recording.recorder import Recorder
from paceline.recording.run_folder import SavedRun
from paceline.recording.script_runs import SCRIPT
from paceline.recording.validation import believed
from paceline.run.logged_timeouts import LoggedFailureDetector, is_needed
from paceline.run.plan_json import plan_of
from paceline.run.replayed_shares import replay_shares
from paceline.utils.argument_types import checked_types
from paceline.utils.representation import Representation

DECISIONS = (records.UpdateMade, records.DecisionMade, records.GradientArrived, records.WorkInterrupted)
FROM_OUTSIDE = {Outcome.STOPPED, Outcome.INTERRUPTED, Outcome.NO_WORKERS, Outcome.FAILED, Outcome.NOT_FINITE}


@dataclass(frozen=True, repr=False)
class Replay(Representation):
    """Result of a replay.

    Attributes:
        updates: number of updates in the log.
        decisions: number of decisions in the log: updates, used and dropped gradients, interrupts, and changes of
            protocol, quorum and membership.
        difference: first difference between log and replay, as text; empty without any.
    """

    updates: int
    decisions: int
    difference: str

    @property
    def is_same(self) -> bool:
        """Whether the replay reproduced every decision."""
        return not self.difference

    def _facts(self) -> Mapping[str, object]:
        facts = {"is_same": self.is_same, "updates": self.updates, "decisions": self.decisions}
        return facts if self.is_same else {**facts, "difference": self.difference}


@checked_types
def replay(run: str | Path, protocol: Protocol | Phase | Plan | None = None) -> Replay:
    """Replay the logged events of a run and compare the decisions of the coordinator with those in the log.

    The events have the times, losses and norms of the log; no gradient is computed.

    Args:
        run: folder of the run.
        protocol: protocol or plan of the run; needed only if it has a controller or a function of the user.

    Raises:
        UsageError: the folder has no run, or the run cannot be replayed.
        RunError: the log cannot be read.
    """
    saved = SavedRun(run)
    with believed(saved.path):
        return _replayed(saved, protocol)


def _replayed(saved: SavedRun, protocol: Protocol | Phase | Plan | None) -> Replay:
    if SCRIPT in saved.configuration:
        return Replay(*replay_shares(saved))
    _check_unchanged(saved.path, saved.history.of(records.RunResumed))
    plan = plan_of(saved.configuration["plan"]) if protocol is None else _checked(protocol, saved)
    return _compared(saved, plan, _stops(saved))


class _Stops(NamedTuple):
    """Stop conditions of a log in order.

    Attributes:
        rules: stop conditions; the next one applies from each `RunResumed` and from each place below.
        places: numbers of the records before which a run was resumed with another stop and without a restart.
    """

    rules: list[StopRule]
    places: Counter[int]


def _stops(saved: SavedRun) -> _Stops:
    """Return the stops in `run.json` and in the records of resumed runs."""
    without_restart = saved.configuration["stops_before"]
    places = saved.records_until([log_bytes for _, log_bytes in without_restart])
    found = [(place, stop) for place, (stop, _) in zip(places, without_restart, strict=True)]
    found += [
        (number, record.stop_before)
        for number, record in enumerate(saved.history)
        if isinstance(record, records.RunResumed)
    ]
    in_order = [stop for _, stop in sorted(found, key=itemgetter(0))]
    return _Stops([StopRule.parse(stop) for stop in (*in_order, saved.configuration["stop"])], Counter(places))


def _compared(saved: SavedRun, plan: Plan, stops: _Stops) -> Replay:
    """Compare the log with a replay under these stops."""
    replayer = _Replayer(plan, stops, saved)
    updates = decisions = 0
    for number, (record, after) in enumerate(pairwise(chain(saved.history, [None]))):
        assert record is not None
        if number in stops.places:
            replayer.change_stop(stops.places[number])
        if isinstance(record, records.VersionEvaluated) and isinstance(after, records.RunEnded):
            continue  # evaluation of the final version, after the last decision
        updates += isinstance(record, records.UpdateMade)
        decisions += isinstance(record, DECISIONS)
        difference = replayer.difference(record)
        if difference:
            break
    else:
        difference = replayer.missed_decision()
    return Replay(updates, decisions, f"after {updates} updates: {difference}" if difference else "")


class _Replayer:
    """Coordinator and recorder that follow a log record by record."""

    def __init__(self, plan: Plan, stops: _Stops, saved: SavedRun) -> None:
        configuration = saved.configuration
        self._plan = plan
        self._stops = iter(stops.rules)
        self._rules = saved.rules
        self._failure_detector = LoggedFailureDetector(saved.history) if is_needed(saved.history) else None
        self._now = 0.0
        self._coordinator = self._next_coordinator()
        self._memory = Memory()
        n, batch_size = configuration["workers"], configuration["batch_size"]
        self._recorder = Recorder(
            workers=n,
            batch_size=batch_size,
            memory="",
            learning_rate=lambda: 0.0,
            callbacks=[self._memory],
            local_steps=plan.local_steps,
        )
        self._logged: deque[records.Record] = deque()  # records not compared yet
        self._end = ""  # reason for which the coordinator ended the run

    def difference(self, record: records.Record) -> str:
        """Process the next record of the log; return the difference to the replay as text, empty if none."""
        if self._failure_detector is not None:
            self._failure_detector.read(record)
        if isinstance(record, records.RunEnded):
            return self._compared_end(record)
        self._now = record.now_s
        self._logged.append(record)
        found = self._compared()
        if not found and self._logged and self._feed(record):
            found = self._compared() or self.missed_decision()
        return found

    def change_stop(self, times: int) -> None:
        """Apply the next stop as a resumed run does, several times if each stop ended the run at once."""
        for _ in range(times):
            self._replace_coordinator()
            commands = self._coordinator.begin(self._now)
            self._recorder.observe(self._now, None, commands)
            self._end = _reason_of_end(commands)

    def missed_decision(self) -> str:
        """Return the first decision that the log has and the replay has not, as text; empty if none."""
        missed = next((record for record in self._logged if isinstance(record, DECISIONS)), None)
        return f"the log has {missed}, the replay has not" if missed else ""

    def _compared(self) -> str:
        """Compare the logged records with the replayed ones, as far as both exist."""
        made = self._memory.records
        while self._logged and made:
            ours, theirs = self._logged.popleft(), made.pop(0)
            if _comparable(ours) != _comparable(theirs):
                return f"the log has {ours}, the replay has {theirs}"
        return ""

    def _compared_end(self, record: records.RunEnded) -> str:
        if record.reason == self._end or (not self._end and record.outcome in FROM_OUTSIDE):
            return self.missed_decision()
        return f"the log ends because {record.reason}, the replay {f'because {self._end}' if self._end else 'goes on'}"

    def _feed(self, record: records.Record) -> bool:
        """Pass the event of a record to the coordinator; return whether the record has one."""
        match record:
            case records.RunStarted():
                self._recorder.observe(record.now_s, None, self._coordinator.begin(record.now_s))
                return True
            case records.RunResumed():
                self._replace_coordinator()
        event = records.event_of(record)
        if event is None or (self._coordinator.stopped and not isinstance(event, Restarted)):
            return False
        commands = self._coordinator.handle(event)
        self._recorder.observe(record.now_s, event, commands)
        self._end = _reason_of_end(commands)
        return True

    def _replace_coordinator(self) -> None:
        """Continue with a new coordinator that has the next stop and the state of the old one."""
        state = self._coordinator.state_dict()
        self._coordinator = self._next_coordinator()
        self._coordinator.load_state_dict(state)

    def _next_coordinator(self) -> Coordinator:
        return self._rules.coordinator(self._plan, next(self._stops), self._failure_detector)


def _reason_of_end(commands: Sequence[Command]) -> str:
    return next((command.reason for command in commands if isinstance(command, EndRun)), "")


def _checked(given: Protocol | Phase | Plan, saved: SavedRun) -> Plan:
    rules, stop = saved.rules, StopRule.parse(saved.configuration["stop"])
    per_epoch = rules.per_epoch
    plan = checked_plan(as_plan(given), rules.workers, total=stop.workload(per_epoch), per_epoch=per_epoch)
    if str(plan) != saved.configuration["protocol"]:
        raise UsageError(f"{saved.path} ran {saved.configuration['protocol']}, given {plan}; expected the same plan")
    return plan


def _comparable(record: records.Record) -> bytes:
    """Return a record without the fields unknown to a coordinator; as text, because nan is not equal to itself."""
    if isinstance(record, records.UpdateMade):
        record = replace(record, learning_rate=0.0)
    elif isinstance(record, records.RunStarted):
        record = replace(record, memory="")
    return to_line(record)


def _check_unchanged(path: Path, resumed: Sequence[records.RunResumed]) -> None:
    for record in resumed:
        if record.changes:
            raise UsageError(
                f"{path} was resumed with changes at update {record.version} ({record.changes}); only runs with "
                "one plan and one cluster can be replayed"
            )
