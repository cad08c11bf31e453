"""Conversion of events and commands to records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

from paceline.coordinator.membership import SILENT
from paceline.core import events, records
from paceline.protocols.local_steps import LocalSteps
from paceline.recording.callback import Callback
from paceline.recording.history import Totals, mean_loss
from paceline.utils.state_dict import Stateful
from paceline.utils.user_code import note_place

REMEMBERED = 100  # pieces of cancelled work of a worker


class Recorder(Stateful):
    """Makes records of events and commands, counts them, and passes them to the callbacks.

    Args:
        workers: number of workers at the beginning.
        batch_size: samples of a minibatch, for work that was never computed.
        memory: memory that the versions may take, in text.
        learning_rate: function that returns the learning rate of the optimizer now.
        callbacks: receivers of every record.
        local_steps: local steps of the workers, which tell the minibatches of work that names none; None without.

    Attributes:
        totals: counts of the whole run.
        evaluation: latest evaluation; None before the first.
        reached_s: time at which the version of the latest event was made, in seconds.
    """

    _saved = (
        "reached_s",
        "_work",
        "_cancelled",
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
    _parts = ("totals",)

    def __init__(
        self,
        workers: int,
        batch_size: int,
        memory: str,
        learning_rate: Callable[[], float],
        callbacks: Sequence[Callback] = (),
        local_steps: LocalSteps | None = None,
    ) -> None:
        self.totals = Totals()
        self.evaluation: records.VersionEvaluated | None = None
        self.reached_s = 0.0
        self._workers = workers
        self._batch_size = batch_size
        self._minibatches = local_steps.H or 1 if local_steps is not None else 1
        self._memory = memory
        self._learning_rate = learning_rate
        self._callbacks = callbacks
        self._has_begun = False
        self._work: dict[int, tuple[events.Compute, float]] = {}  # with its start
        self._cancelled: dict[int, dict[int, tuple[events.Compute, float]]] = {}  # a gradient may still arrive
        self._losses: list[float] = []
        self._workload = 0
        self._rate = learning_rate()
        self._now = 0.0
        self._updated_s = 0.0
        self._version = 0
        self._published_s: dict[int, float] = {}  # of versions whose evaluation is running
        self._joined_s: dict[int, float] = {}
        self._busy_s = 0.0
        self._live_s = 0.0

    def observe(self, now: float, event: events.Event | None, commands: Sequence[events.Command]) -> None:
        """Record an event and the commands that answered it."""
        self._now = now
        if event is not None:
            self.reached_s = now
        match event:
            case None:
                self._begin(now)
            case events.Restarted():
                self._restart(event)
            case events.Evaluated():
                self.reached_s = self._published_s.pop(event.version, now)
                metrics = dict(event.metrics)
                self._evaluated(
                    records.VersionEvaluated(
                        now_s=now, version=event.version, published_s=self.reached_s, metrics=metrics, event_s=event.now
                    )
                )
            case events.UpdateApplied():
                self._publish(
                    records.StepMeasured(now_s=now, version=event.version, **event.step._asdict(), event_s=event.now)
                )
            case events.Joined():
                self._joined_s.setdefault(event.worker, now)
                self._publish(records.WorkerJoined(now_s=now, worker=event.worker, event_s=event.now))
            case events.Lost():
                self._leave(event.worker, now)
                self._publish(
                    records.WorkerLost(now_s=now, worker=event.worker, reason=event.reason, event_s=event.now)
                )
            case events.SharesMemory():
                self._publish(records.MemoryShared(now_s=now, worker=event.worker, event_s=event.now))
            case events.Timer():
                self._publish(records.TimerRang(now, event.now))
        for command in commands:
            self._command(now, event, command)
        self._rate = self._learning_rate()  # before the next update, after which a schedule may change it

    def end(self, stop: events.EndRun, version: int, metrics: Mapping[str, float]) -> None:
        """Record the end of the run, with the metrics of the last version if there are evaluation data."""
        now = self._now
        for worker in list(self._joined_s):
            self._leave(worker, now)
        if metrics:
            self._evaluated(
                records.VersionEvaluated(now_s=now, version=version, published_s=self._updated_s, metrics=dict(metrics))
            )
        self._publish(
            records.RunEnded(
                now_s=now, outcome=stop.outcome, reason=stop.reason, busy_s=self._busy_s, live_s=self._live_s
            )
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load such counts."""
        self._has_begun = True
        super().load_state_dict(state)

    def _begin(self, now: float) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._joined_s = dict.fromkeys(range(self._workers), now)
            self._publish(records.RunStarted(now, self._workers, self._memory))

    def _restart(self, event: events.Restarted) -> None:
        for worker in list(self._work):
            self._record_unfinished(worker, event.now)
        for worker in [worker for worker in self._joined_s if worker >= event.workers]:
            self._leave(worker, event.now)
        for worker in range(event.workers):
            self._joined_s.setdefault(worker, event.now)
        self._published_s.clear()
        self._publish(
            records.RunResumed(
                now_s=event.now,
                version=self._version,
                workers=event.workers,
                stop_before=event.stop_before,
                changes=event.changes,
            )
        )

    def _evaluated(self, record: records.VersionEvaluated) -> None:
        self.evaluation = record
        self._publish(record)

    def _command(self, now: float, event: events.Event | None, command: events.Command) -> None:
        match command:
            case events.Compute():
                if command.worker not in self._joined_s:  # a worker that was lost has delivered
                    self._joined_s[command.worker] = now
                    self._publish(records.WorkerJoined(now_s=now, worker=command.worker, late_return=True))
                self._work[command.worker] = (command, now)
            case events.Accept() | events.Drop():
                assert isinstance(event, events.Arrival)
                self._arrival(now, event, command)
            case events.Interrupt():
                work, started_s = self._cancel(command.worker, now)
                minibatch = work.minibatch
                length = self._minibatches if minibatch is None else minibatch.length * minibatch.share
                self._publish(
                    records.WorkInterrupted(
                        now_s=now,
                        worker=command.worker,
                        draw=command.draw,
                        version=work.version,
                        started_s=started_s,
                        samples=round(length * self._batch_size),
                    )
                )
            case events.Apply():
                self._update(now, command)
            case events.Evaluate():
                self._published_s[command.version] = self._updated_s
            case events.Decision():
                if command.kind == SILENT and command.worker is not None:
                    self._leave(command.worker, now)
                    self._publish(
                        records.WorkerLost(now_s=now, worker=command.worker, reason=command.reason, silent=True)
                    )
                self._publish(records.DecisionMade.of(now, command))

    def _arrival(self, now: float, event: events.Arrival, command: events.Accept | events.Drop) -> None:
        work, started_s = self._delivered(command.worker, command.draw, now)
        version = work.version if work is not None else self._version
        if isinstance(command, events.Accept):
            self._losses.append(event.measured.loss)
        self._publish(
            records.GradientArrived.of(
                event,
                command,
                now_s=now,
                version=version,
                started_s=started_s,
                staleness=self._version - version,
                samples=event.measured.samples or self._batch_size,
            )
        )

    def _update(self, now: float, command: events.Apply) -> None:
        staleness = [gradient.staleness for gradient in command.gradients]
        k = len(command.gradients)
        self._workload += command.workload
        self._updated_s = now
        self._version = command.version
        self._publish(
            records.UpdateMade(
                now_s=now,
                version=command.version,
                k=k,
                workload=self._workload,
                samples=sum(gradient.samples for gradient in command.gradients),
                loss=mean_loss(self._losses, [gradient.samples for gradient in command.gradients]) if k else nan,
                learning_rate=self._rate * command.lr_scale,
                staleness=sum(staleness) / k if k else 0.0,
                max_staleness=max(staleness, default=0),
                reason=command.reason,
                step_scale=command.step_scale,
                busy_s=self._busy_s + sum(now - started_s for _, started_s in self._work.values()),
                live_s=self._live_s + sum(now - joined_s for joined_s in self._joined_s.values()),
            )
        )
        self._losses.clear()

    def _delivered(self, worker: int, draw: int, now: float) -> tuple[events.Compute | None, float]:
        """Return the work of a gradient and its start; None for work that was cancelled long ago."""
        work, _ = self._work.get(worker, (None, now))
        if work is not None and work.draw == draw:
            return self._finish(worker, now)
        return self._cancelled.get(worker, {}).get(draw, (None, now))

    def _finish(self, worker: int, now: float) -> tuple[events.Compute, float]:
        work, started_s = self._work.pop(worker)
        self._busy_s += now - started_s
        self._cancelled.pop(worker, None)  # a worker has one piece of work at a time
        return work, started_s

    def _cancel(self, worker: int, now: float) -> tuple[events.Compute, float]:
        before = self._cancelled.get(worker, {})
        work, started_s = self._finish(worker, now)
        latest = [*before.items(), (work.draw, (work, started_s))][-REMEMBERED:]
        self._cancelled[worker] = dict(latest)
        return work, started_s

    def _record_unfinished(self, worker: int, now: float) -> None:
        work, started_s = self._cancel(worker, now)
        self._publish(
            records.WorkUnfinished(now_s=now, worker=worker, draw=work.draw, version=work.version, started_s=started_s)
        )

    def _leave(self, worker: int, now: float) -> None:
        if worker in self._work:
            self._record_unfinished(worker, now)
        self._live_s += now - self._joined_s.pop(worker, now)

    def _publish(self, record: records.Record) -> None:
        self.totals.count(record)
        for callback in self._callbacks:
            try:
                callback.on_record(record)
            except Exception as error:
                note_place(
                    error, f"callback {type(callback).__name__} failed at {type(record).__name__}, {record.now_s:.6g} s"
                )
                raise
