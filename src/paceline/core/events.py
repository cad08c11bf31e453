"""What engines tell the coordinator (events) and what it tells them to do (commands): plain, immutable data."""

from collections.abc import Mapping
from enum import StrEnum
from math import inf, nan
from typing import NamedTuple


class Minibatch(NamedTuple):
    """Which samples a worker is to use, as numbers that the job turns into indices.

    Attributes:
        shard: part of the data set, 0 when all workers share it.
        epoch: pass over the shard, or None when samples are drawn with replacement.
        number: position of the minibatch in its shuffled epoch, or None likewise.
    """

    shard: int
    epoch: int | None
    number: int | None


class Outcome(StrEnum):
    """Why a run ended."""

    LOSS = "loss"
    ACCURACY = "accuracy"
    EVAL_LOSS = "eval_loss"
    METRIC = "metric"
    UPDATES = "updates"
    GRADIENTS = "gradients"
    EPOCHS = "epochs"
    SECONDS = "seconds"
    INTERRUPTED = "interrupted"
    NO_WORKERS = "no_workers"
    NOT_FINITE = "not_finite"
    DIVERGED = "diverged"
    FAILED = "failed"

    @property
    def is_failure(self) -> bool:
        """Whether the run could not go on, as opposed to: reached its end or was told to stop."""
        return self.is_crash or self.is_divergence

    @property
    def is_crash(self) -> bool:
        """Whether something failed, so that the run is no result of its protocol."""
        return self in {Outcome.NO_WORKERS, Outcome.FAILED}

    @property
    def is_divergence(self) -> bool:
        """Whether training itself diverged, which is a result of the protocol and the learning rate."""
        return self in {Outcome.NOT_FINITE, Outcome.DIVERGED}


# --- events -----------------------------------------------------------------------------------------------


class Compensation(NamedTuple):
    """What was done about the staleness of a gradient.

    Attributes:
        formula: in words.
        factor: that was applied, a step scale or the lambda of a correction.
    """

    formula: str
    factor: float


class Arrival(NamedTuple):
    """A worker finished a gradient.

    Attributes:
        now: seconds since the run began.
        worker: who.
        draw: which piece of work, as numbered by its `Compute`.
        loss: mean loss of the minibatch.
        samples: size of the minibatch.
        squared_norm: of the gradient.
        variance: of the gradient, as its microbatches show it; nan without any.
        finite: whether loss and gradient are.
        pull_s: seconds to receive the parameters.
        compute_s: seconds of forward and backward, injected slowness included, waiting for others not; those of a real
            worker without a server with its own step.
        push_s: seconds to hand in the gradient.
        step_scale: that compensators give it.
        compensations: what they did.
        sum_s: seconds of the sum that it is a part of, from when all was handed in; 0 if none was made yet, nan with a
            server. This and the next are for the log: nothing is decided by them, and of real ranks only 0 knows them.
        left_over_s: seconds in which real ranks without a server neither computed nor waited for each other or a sum.
    """

    now: float
    worker: int
    draw: int
    loss: float = nan
    samples: int = 1
    squared_norm: float = nan
    finite: bool = True
    pull_s: float = 0.0
    compute_s: float = 0.0
    push_s: float = 0.0
    variance: float = nan
    step_scale: float = 1.0
    compensations: tuple[Compensation, ...] = ()
    sum_s: float = nan
    left_over_s: float = 0.0


class Step(NamedTuple):
    """The step s = w_t - w_{t+1} that an update has taken, and the mean gradient g that it was made of.

    Plain SGD with learning rate eta has s = eta g, so that g.s = eta ||g||^2 and ||s||^2 = eta^2 ||g||^2.

    Attributes:
        squared_norm: ||g||^2, before any clipping.
        progress: g.s, the inner product.
        squared_step: ||s||^2.
        learning_rate: eta, that the optimizer stepped with, the largest of its parameter groups'.
        next_learning_rate: the optimizer's own, without any scale, for the next step.
    """

    squared_norm: float
    progress: float
    squared_step: float
    learning_rate: float
    next_learning_rate: float


class UpdateApplied(NamedTuple):
    """The step of an update, as its `Apply` has asked for; no other event comes between the two.

    Attributes:
        version: that the update has made.
    """

    now: float
    version: int
    step: Step


class Joined(NamedTuple):
    """A worker is there and can be given work."""

    now: float
    worker: int


class Lost(NamedTuple):
    """A worker is gone; what it was computing will not come."""

    now: float
    worker: int
    reason: str


class Timer(NamedTuple):
    """A moment that a `SetTimer` asked for has come."""

    now: float


class Evaluated(NamedTuple):
    """The evaluation of a version is done."""

    now: float
    version: int
    metrics: Mapping[str, float]


class AbortRun(NamedTuple):
    """The run has to end for a reason outside the coordinator: a signal, a full disk, no worker left."""

    now: float
    outcome: Outcome
    reason: str


class Restarted(NamedTuple):
    """The run goes on from a checkpoint, and its workers have lost what they were doing.

    Attributes:
        workers: that it goes on with, numbered from 0.
        stop_before: the conditions that would have ended it before.
        changes: what differs from the run before, in words; empty for nothing.
    """

    now: float
    workers: int
    stop_before: str = ""
    changes: str = ""


Event = Arrival | UpdateApplied | Joined | Lost | Timer | Evaluated | AbortRun | Restarted


# --- commands ---------------------------------------------------------------------------------------------


class Compute(NamedTuple):
    """Give a worker one piece of work: the gradient of a minibatch at a version."""

    worker: int
    version: int
    draw: int
    minibatch: Minibatch | None = None


class Interrupt(NamedTuple):
    """Let a worker abandon its work."""

    worker: int
    draw: int


class Accept(NamedTuple):
    """Add the gradient that just arrived to the open update.

    Attributes:
        step_scale: its weight, besides its samples.
    """

    worker: int
    draw: int
    staleness: int
    samples: int
    step_scale: float = 1.0


class Drop(NamedTuple):
    """Forget the gradient that just arrived.

    Attributes:
        staleness: None for an old draw, whose version is forgotten already.
    """

    worker: int
    draw: int
    staleness: int | None
    reason: str


class Apply(NamedTuple):
    """Make one update of the accepted gradients and publish it as a version.

    Attributes:
        version: the new version.
        gradients: those that enter, in the order of their arrival.
        lr_scale: what the optimizer's learning rate is multiplied by for this step.
        reason: why the update is made now.
        measure: whether an `UpdateApplied` is to follow at once.
        step_scale: mean of the gradients', by which the mean gradient, each weighted with its own, is multiplied.
        momentum_limit: the largest momentum that the optimizer may step with.
        weight_decay_scale: what the optimizer's weight decay is multiplied by for this step.
    """

    version: int
    gradients: tuple[Accept, ...]
    lr_scale: float
    reason: str
    measure: bool = False
    step_scale: float = 1.0
    momentum_limit: float = inf
    weight_decay_scale: float = 1.0


class RestartWorker(NamedTuple):
    """Give a worker up and start another one in its place, if that can be done; a `Lost` and a `Joined` will tell."""

    worker: int


class Evaluate(NamedTuple):
    """Measure a version on the evaluation data."""

    version: int


class SetTimer(NamedTuple):
    """Send a `Timer` at this moment."""

    at_s: float


class Decision(NamedTuple):
    """Something was decided; for the record.

    Attributes:
        worker: whom it is about, if anybody.
        k: the quorum that was chosen, if one was.
    """

    kind: str
    reason: str
    worker: int | None = None
    k: int | None = None


class EndRun(NamedTuple):
    """End the run."""

    outcome: Outcome
    reason: str


Command = Compute | Interrupt | RestartWorker | Accept | Drop | Apply | Evaluate | SetTimer | Decision | EndRun
