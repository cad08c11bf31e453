"""From events and commands to records: the one place that knows both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.coordinator.membership import SILENT
from paceline.coordinator.updates import OLD_DRAW
from paceline.core.events import (
    Accept,
    Apply,
    Arrival,
    Command,
    Compute,
    Decision,
    Drop,
    EndRun,
    Evaluate,
    Evaluated,
    Event,
    Interrupt,
    Joined,
    Lost,
    Restarted,
    Timer,
    UpdateApplied,
)
from paceline.core.records import (
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
    WorkUnfinished,
)
from paceline.recording.callback import Callback
from paceline.recording.history import Totals, mean_loss
from paceline.utils.state_dict import restore, snapshot
from paceline.utils.user_code import note_place

REMEMBERED = 100  # pieces of abandoned work of a worker


class Recorder:
    """Counts what happens in a run and tells the callbacks.

    Args:
        workers: that the run begins with.
        batch_size: samples of a minibatch, for what was never computed.
        memory: how much the versions may take, in words.
        learning_rate: gives the optimizer's own rate now.
        callbacks: that hear every record.
    """

    def __init__(
        self,
        workers: int,
        batch_size: int,
        memory: str,
        learning_rate: Callable[[], float],
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.totals = Totals()
        self.evaluation: VersionEvaluated | None = None  # the latest
        self.reached_s = 0.0  # when the version was made that the latest event tells of
        self._workers = workers
        self._batch_size = batch_size
        self._memory = memory
        self._learning_rate = learning_rate
        self._callbacks = callbacks
        self._has_begun = False
        self._work: dict[int, tuple[Compute, float]] = {}  # with when it was given
        self._abandoned: dict[int, dict[int, tuple[Compute, float]]] = {}  # a gradient may come all the same
        self._losses: list[float] = []
        self._workload = 0
        self._rate = learning_rate()
        self._now = 0.0
        self._updated_s = 0.0
        self._version = 0
        self._published_s: dict[int, float] = {}  # of versions that are being evaluated
        self._joined_s: dict[int, float] = {}
        self._busy_s = 0.0
        self._live_s = 0.0

    def observe(self, now: float, event: Event | None, commands: Sequence[Command]) -> None:
        """Take in an event with the commands that answered it."""
        self._now = now
        if event is not None:
            self.reached_s = now
        match event:
            case None:
                self._begin(now)
            case Restarted():
                self._restart(event)
            case Evaluated():
                self.reached_s = self._published_s.pop(event.version, now)
                metrics = dict(event.metrics)
                self._evaluated(VersionEvaluated(now, event.version, self.reached_s, metrics, event.now))
            case UpdateApplied():
                self._tell(StepMeasured(now, event.version, *event.step, event_s=event.now))
            case Joined():
                self._joined_s.setdefault(event.worker, now)
                self._tell(WorkerJoined(now, event.worker, event_s=event.now))
            case Lost():
                self._leave(event.worker, now)
                self._tell(WorkerLost(now, event.worker, event.reason, event_s=event.now))
            case Timer():
                self._tell(TimerRang(now, event.now))
        for command in commands:
            self._command(now, event, command)
        self._rate = self._learning_rate()  # before the next update, which the schedule may follow

    def end(self, stop: EndRun, version: int, metrics: Mapping[str, float]) -> None:
        """Close the books, with the metrics of the last version where there are evaluation data."""
        now = self._now
        for worker in list(self._joined_s):
            self._leave(worker, now)
        if metrics:
            self._evaluated(VersionEvaluated(now, version, self._updated_s, dict(metrics)))
        self._tell(RunEnded(now, stop.outcome, stop.reason, self._busy_s, self._live_s))

    def state_dict(self) -> dict[str, Any]:
        """Return all counts."""
        return {
            "totals": vars(self.totals) | {"staleness": Counter(self.totals.staleness)},
            **snapshot(self, _SAVED),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such counts."""
        self._has_begun = True
        self.totals = Totals(**state["totals"])
        restore(self, _SAVED, state)

    def _begin(self, now: float) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._joined_s = dict.fromkeys(range(self._workers), now)
            self._tell(RunStarted(now, self._workers, self._memory))

    def _restart(self, event: Restarted) -> None:
        for worker in list(self._work):
            self._give_up(worker, event.now)
        for worker in [worker for worker in self._joined_s if worker >= event.workers]:
            self._leave(worker, event.now)
        for worker in range(event.workers):
            self._joined_s.setdefault(worker, event.now)
        self._published_s.clear()
        self._tell(RunResumed(event.now, self._version, event.workers, event.stop_before, event.changes))

    def _evaluated(self, record: VersionEvaluated) -> None:
        self.evaluation = record
        self._tell(record)

    def _command(self, now: float, event: Event | None, command: Command) -> None:
        match command:
            case Compute():
                if command.worker not in self._joined_s:  # a late return is a join
                    self._joined_s[command.worker] = now
                    self._tell(WorkerJoined(now, command.worker, late_return=True))
                self._work[command.worker] = (command, now)
            case Accept() | Drop():
                assert isinstance(event, Arrival)
                self._arrival(now, event, command)
            case Interrupt():
                work, started_s = self._abandon(command.worker, now)
                self._tell(
                    WorkInterrupted(now, command.worker, command.draw, work.version, started_s, self._batch_size)
                )
            case Apply():
                self._update(now, command)
            case Evaluate():
                self._published_s[command.version] = self._updated_s
            case Decision():
                if command.kind == SILENT and command.worker is not None:
                    self._leave(command.worker, now)
                    self._tell(WorkerLost(now, command.worker, command.reason, silent=True))
                self._tell(DecisionMade(now, command.kind, command.reason, command.worker, command.k))

    def _arrival(self, now: float, event: Arrival, command: Accept | Drop) -> None:
        work, started_s = self._delivered(command.worker, command.draw, now)
        version = work.version if work is not None else self._version
        samples = event.samples or self._batch_size
        if isinstance(command, Accept):
            self._losses.append(event.loss)
        self._tell(
            GradientArrived(
                now_s=now,
                worker=event.worker,
                draw=event.draw,
                version=version,
                started_s=started_s,
                staleness=self._version - version,
                used=isinstance(command, Accept),
                reason=command.reason if isinstance(command, Drop) else "",
                loss=event.loss,
                samples=samples,
                squared_norm=event.squared_norm,
                pull_s=event.pull_s,
                compute_s=event.compute_s,
                push_s=event.push_s,
                crossed_interrupt=isinstance(command, Drop) and command.reason == OLD_DRAW,
                event_s=event.now,
                variance=event.variance,
                step_scale=event.step_scale,
                compensations=[(each.formula, each.factor) for each in event.compensations],
                sum_s=event.sum_s,
                left_over_s=event.left_over_s,
            )
        )

    def _update(self, now: float, command: Apply) -> None:
        staleness = [gradient.staleness for gradient in command.gradients]
        k = len(command.gradients)
        self._workload += k
        self._updated_s = now
        self._version = command.version
        self._tell(
            UpdateMade(
                now_s=now,
                version=command.version,
                k=k,
                workload=self._workload,
                samples=sum(gradient.samples for gradient in command.gradients),
                loss=mean_loss(self._losses),
                learning_rate=self._rate * command.lr_scale,
                staleness=sum(staleness) / k,
                max_staleness=max(staleness),
                reason=command.reason,
                step_scale=command.step_scale,
                busy_s=self._busy_s + sum(now - started_s for _, started_s in self._work.values()),
                live_s=self._live_s + sum(now - joined_s for joined_s in self._joined_s.values()),
            )
        )
        self._losses.clear()

    def _delivered(self, worker: int, draw: int, now: float) -> tuple[Compute | None, float]:
        """Return the work whose gradient has come, and when it was given; nothing is known of very old work."""
        work, _ = self._work.get(worker, (None, now))
        if work is not None and work.draw == draw:
            return self._finish(worker, now)
        return self._abandoned.get(worker, {}).get(draw, (None, now))

    def _finish(self, worker: int, now: float) -> tuple[Compute, float]:
        work, started_s = self._work.pop(worker)
        self._busy_s += now - started_s
        self._abandoned.pop(worker, None)  # a worker does one thing after the other
        return work, started_s

    def _abandon(self, worker: int, now: float) -> tuple[Compute, float]:
        before = self._abandoned.get(worker, {})
        work, started_s = self._finish(worker, now)
        latest = [*before.items(), (work.draw, (work, started_s))][-REMEMBERED:]
        self._abandoned[worker] = dict(latest)
        return work, started_s

    def _give_up(self, worker: int, now: float) -> None:
        work, started_s = self._abandon(worker, now)
        self._tell(WorkUnfinished(now, worker, work.draw, work.version, started_s))

    def _leave(self, worker: int, now: float) -> None:
        if worker in self._work:
            self._give_up(worker, now)
        self._live_s += now - self._joined_s.pop(worker, now)

    def _tell(self, record: Record) -> None:
        self.totals.count(record)
        for callback in self._callbacks:
            try:
                callback.on_record(record)
            except Exception as error:
                note_place(
                    error, f"callback {type(callback).__name__} failed at {type(record).__name__}, {record.now_s:.6g} s"
                )
                raise


# The part of the state that a checkpoint can hold as it is.
_SAVED = (
    "reached_s",
    "_work",
    "_abandoned",
    "_losses",
    "_workload",
    "_rate",
    "_now",
    "_updated_s",
    "_version",
    "_published_s",
    "_joined_s",
    "_busy_s",
    "_live_s",
)
