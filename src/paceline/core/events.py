"""Events that engines report to the coordinator, and commands that it answers with: plain, immutable data."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from paceline.core.bounds import Metrics, Share, Whole
from paceline.core.decision import Decision as Decision
from paceline.core.gradient import NOT_FINITE as NOT_FINITE
from paceline.core.gradient import NOTICE as NOTICE
from paceline.core.gradient import OLD_DRAW as OLD_DRAW
from paceline.core.gradient import OVERFLOW as OVERFLOW
from paceline.core.gradient import SKIPPED as SKIPPED
from paceline.core.gradient import Accept as Accept
from paceline.core.gradient import Arrival as Arrival
from paceline.core.gradient import Compensation as Compensation
from paceline.core.gradient import Drop as Drop
from paceline.core.gradient import Measured as Measured
from paceline.core.update import Apply as Apply
from paceline.core.update import Step as Step
from paceline.core.update import UpdateApplied as UpdateApplied


class MinibatchSlice(NamedTuple):
    """Range of the samples of a minibatch.

    Attributes:
        worker: number of the worker that would compute the minibatch, for samples drawn with replacement.
        draw: number of the draw of that worker.
        epoch: number of the pass over the data; None if samples are drawn with replacement.
        number: position in the shuffled epoch; None if samples are drawn with replacement.
        begin: first sample, from 0.
        end: sample after the last one.
    """

    worker: Whole
    draw: Whole
    epoch: Whole | None
    number: Whole | None
    begin: Whole
    end: Whole


class Minibatch(NamedTuple):
    """Number of a minibatch, from which the job computes sample indices; with local steps, a run of minibatches.

    Attributes:
        shard: number of the shard of the data; 0 if all workers share the data.
        epoch: number of the pass over the shard; None if samples are drawn with replacement.
        number: position in the shuffled epoch; None if samples are drawn with replacement.
        length: number of minibatches from this position on, >= 1.
        slices: ranges of samples in place of the whole minibatch; empty for all of it.
        share: samples of these ranges over those of a whole minibatch, > 0.
    """

    shard: int
    epoch: int | None
    number: int | None
    length: int = 1
    slices: tuple[MinibatchSlice, ...] = ()
    share: Share = 1.0

    def after(self, count: int) -> Minibatch:
        """Return this run of minibatches without its first ones."""
        number = None if self.number is None else self.number + count
        return self._replace(number=number, length=self.length - count)


class Outcome(StrEnum):
    """Outcome of a run."""

    LOSS = "loss"
    ACCURACY = "accuracy"
    EVAL_LOSS = "eval_loss"
    METRIC = "metric"
    UPDATES = "updates"
    GRADIENTS = "gradients"
    EPOCHS = "epochs"
    SECONDS = "seconds"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    NO_WORKERS = "no_workers"
    NOT_FINITE = "not_finite"
    DIVERGED = "diverged"
    FAILED = "failed"

    @property
    def is_failure(self) -> bool:
        """Whether the run crashed or diverged."""
        return self.is_crash or self.is_divergence

    @property
    def is_crash(self) -> bool:
        """Whether a failure ended the run, so that it is no result of its protocol."""
        return self in {Outcome.NO_WORKERS, Outcome.FAILED}

    @property
    def is_divergence(self) -> bool:
        """Whether training diverged, which is a result of the protocol and the learning rate."""
        return self in {Outcome.NOT_FINITE, Outcome.DIVERGED}


# --- events -----------------------------------------------------------------------------------------------


class Joined(NamedTuple):
    """A worker has joined and can receive work."""

    now: float
    worker: int


NOT_JOINED, PAUSE, END_OF_LOOP = "it has not joined yet", "a pause of its loop", "the end of its loop"
CTRL_C = "Ctrl-C"  # reason of an interrupt that reaches all ranks
NO_FAILURES = frozenset({NOT_JOINED, PAUSE, END_OF_LOOP})  # reasons of a loss that does not count as a failure


class Lost(NamedTuple):
    """A worker is lost, and its work with it."""

    now: float
    worker: int
    reason: str


class SharesMemory(NamedTuple):
    """A worker reads versions and writes gradients in the memory of the server on its host, so none is sent."""

    now: float
    worker: int


class Timer(NamedTuple):
    """A time that a `SetTimer` asked for."""

    now: float


class Evaluated(NamedTuple):
    """Metrics of a version."""

    now: float
    version: int
    metrics: Metrics


class AbortRun(NamedTuple):
    """The run must end for a reason outside the coordinator: a signal, a full disk, no worker left."""

    now: float
    outcome: Outcome
    reason: str


class Restarted(NamedTuple):
    """The run resumes from a checkpoint, and its workers have lost their work.

    Attributes:
        workers: number of workers, numbered from 0.
        stop_before: stop conditions before the restart.
        changes: settings that differ from the run before, in text; empty for none.
    """

    now: float
    workers: int
    stop_before: str = ""
    changes: str = ""


Event = Arrival | UpdateApplied | Joined | Lost | SharesMemory | Timer | Evaluated | AbortRun | Restarted


# --- commands ---------------------------------------------------------------------------------------------


class Compute(NamedTuple):
    """Assign work to a worker: the gradient of a minibatch at a version.

    Attributes:
        upcoming: forecast of the minibatches that follow, with which the worker can load data ahead.
        workload: workload of the version, in gradients.
        accepted: newest accepted draw of this worker; 0 for none.
    """

    worker: int
    version: int
    draw: int
    minibatch: Minibatch | None = None
    upcoming: tuple[Minibatch, ...] = ()
    workload: int = 0
    accepted: int = 0


class Interrupt(NamedTuple):
    """Cancel the work of a worker."""

    worker: int
    draw: int


class RestartWorker(NamedTuple):
    """Replace a worker by a new one, where the engine can start workers; a `Lost` and a `Joined` follow."""

    worker: int


class Evaluate(NamedTuple):
    """Evaluate a version on the evaluation data."""

    version: int


class SetTimer(NamedTuple):
    """Report a `Timer` at this time, in seconds since the run began."""

    at_s: float


class EndRun(NamedTuple):
    """End the run."""

    outcome: Outcome
    reason: str


Command = Compute | Interrupt | RestartWorker | Accept | Drop | Apply | Evaluate | SetTimer | Decision | EndRun
