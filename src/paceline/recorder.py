"""From events and commands to records: the one place that knows both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline.callbacks import Callback
from paceline.coordinator import OLD_DRAW
from paceline.events import (
    Accept,
    Apply,
    Arrival,
    Command,
    Compute,
    Decision,
    Drop,
    Evaluate,
    Evaluated,
    Event,
    Interrupt,
    Joined,
    Lost,
    Stop,
)
from paceline.history import (
    DecisionMade,
    GradientArrived,
    History,
    Record,
    RunEnded,
    RunStarted,
    UpdateMade,
    VersionEvaluated,
    WorkerJoined,
    WorkerLost,
    WorkInterrupted,
    mean_loss,
)


class Recorder:
    """Keeps the history of a run and tells the callbacks.

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
        self.history = History()
        self._workers = workers
        self._batch_size = batch_size
        self._memory = memory
        self._learning_rate = learning_rate
        self._callbacks = callbacks
        self._work: dict[int, tuple[Compute, float]] = {}  # with when it was given
        self._abandoned: dict[int, tuple[Compute, float]] = {}  # a gradient may cross its interrupt
        self._losses: list[float] = []
        self._workload = 0
        self._samples_lost = 0
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
        match event:
            case None:
                self._joined_s = dict.fromkeys(range(self._workers), now)
                self._tell(RunStarted(now, self._workers, self._memory))
            case Evaluated():
                published_s = self._published_s.pop(event.version, now)
                self._tell(VersionEvaluated(now, event.version, published_s, dict(event.metrics)))
            case Joined():
                self._joined_s.setdefault(event.worker, now)
                self._tell(WorkerJoined(now, event.worker))
            case Lost():
                self._leave(event.worker, now)
                self._tell(WorkerLost(now, event.worker, event.reason))
        for command in commands:
            self._command(now, event, command)
        self._rate = self._learning_rate()  # before the next update, which the schedule may follow

    def end(self, stop: Stop, version: int, metrics: Mapping[str, float]) -> None:
        """Close the history, with the metrics of the last version where there are evaluation data."""
        now = self._now
        for worker in list(self._joined_s):
            self._leave(worker, now)
        if self._live_s:
            self.history.totals.idle_share = 1 - self._busy_s / self._live_s
        if metrics:
            self._tell(VersionEvaluated(now, version, self._updated_s, dict(metrics)))
        self._tell(RunEnded(now, stop.outcome, stop.reason))

    def _command(self, now: float, event: Event | None, command: Command) -> None:
        match command:
            case Compute():
                if command.worker not in self._joined_s:  # a late return is a join
                    self._joined_s[command.worker] = now
                    self._tell(WorkerJoined(now, command.worker))
                self._work[command.worker] = (command, now)
            case Accept() | Drop():
                assert isinstance(event, Arrival)
                self._arrival(now, event, command)
            case Interrupt():
                work, started_s = self._abandoned[command.worker] = self._finish(command.worker, now)
                self.history.totals.interrupted += 1
                self.history.totals.samples_dropped += self._batch_size
                samples = self._batch_size
                self._tell(WorkInterrupted(now, command.worker, command.draw, work.version, started_s, samples))
            case Apply():
                self._update(now, command)
            case Evaluate():
                self._published_s[command.version] = now
            case Decision():
                if command.worker is not None:
                    self._leave(command.worker, now)
                    self._tell(WorkerLost(now, command.worker, command.reason))
                self._tell(DecisionMade(now, command.kind, command.reason))

    def _arrival(self, now: float, event: Arrival, command: Accept | Drop) -> None:
        work, started_s = self._work.get(command.worker, (None, now))
        if work is not None and work.draw == command.draw:
            self._finish(command.worker, now)
        else:
            work, started_s = self._abandoned.get(command.worker, (None, now))
        version = work.version if work is not None else self._version
        samples = event.samples or self._batch_size
        totals = self.history.totals
        crossed_interrupt = isinstance(command, Drop) and command.reason == OLD_DRAW
        if isinstance(command, Accept):
            self._losses.append(event.loss)
            totals.used += 1
            totals.samples_used += samples
            totals.staleness[command.staleness] += 1
        elif not crossed_interrupt:
            totals.dropped += 1
            totals.samples_dropped += samples
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
                crossed_interrupt=crossed_interrupt,
            )
        )

    def _update(self, now: float, command: Apply) -> None:
        staleness = [gradient.staleness for gradient in command.gradients]
        k = len(command.gradients)
        self._workload += k
        self.history.totals.updates += 1
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
                busy_s=self._busy_s + sum(now - started_s for _, started_s in self._work.values()),
                live_s=self._live_s + sum(now - joined_s for joined_s in self._joined_s.values()),
            )
        )
        self._losses.clear()

    def _finish(self, worker: int, now: float) -> tuple[Compute, float]:
        work, started_s = self._work.pop(worker)
        self._busy_s += now - started_s
        return work, started_s

    def _leave(self, worker: int, now: float) -> None:
        if worker in self._work:
            self._finish(worker, now)
        self._live_s += now - self._joined_s.pop(worker, now)

    def _tell(self, record: Record) -> None:
        self.history.records.append(record)
        for callback in self._callbacks:
            callback.on_record(record)
