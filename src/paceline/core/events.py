"""Events that engines report to the coordinator, and commands that it answers with: plain, immutable data."""

from collections.abc import Mapping
from enum import StrEnum
from math import inf, nan
from typing import NamedTuple

NOT_FINITE = "not finite"
OLD_DRAW = "finished after its interrupt"


class Minibatch(NamedTuple):
    """Number of a minibatch, from which the job computes sample indices.

    Attributes:
        shard: number of the shard of the data; 0 if all workers share the data.
        epoch: number of the pass over the shard; None if samples are drawn with replacement.
        number: position in the shuffled epoch; None if samples are drawn with replacement.
    """

    shard: int
    epoch: int | None
    number: int | None


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


class Compensation(NamedTuple):
    """Compensation of a stale gradient.

    Attributes:
        formula: formula in text.
        factor: applied factor: a step scale, or the lambda of a correction.
    """

    formula: str
    factor: float


class Arrival(NamedTuple):
    """Arrival of a gradient.

    Attributes:
        now: time of the event, in seconds since the run began.
        worker: number of the worker.
        draw: number of the work of this worker.
        loss: mean loss of the minibatch.
        samples: number of samples in the minibatch.
        squared_norm: squared norm of the gradient.
        variance: variance of the gradient, estimated from its microbatches; nan without microbatches.
        finite: whether loss and gradient are finite.
        pull_s: seconds to receive the parameters.
        compute_s: seconds of forward and backward pass, with injected slowness, without waiting for other workers. A
            real worker without a server includes its own step.
        push_s: seconds to send the gradient.
        step_scale: factor that the compensators give it.
        compensations: what each compensator did.
        sum_s: seconds of the all-reduce that includes it, after the last contribution; 0 before the first one, nan
            with a server. Only rank 0 measures it and the next field; both are for the log only.
        left_over_s: seconds in which real ranks without a server neither computed nor waited.
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
    """Step s = w_t - w_{t+1} of an update, and its mean gradient g.

    Plain SGD with learning rate eta has s = eta g, so that g.s = eta ||g||^2 and ||s||^2 = eta^2 ||g||^2.

    Attributes:
        squared_norm: ||g||^2, before any clipping.
        progress: g.s, the inner product.
        squared_step: ||s||^2.
        learning_rate: eta, the learning rate of this step; the largest of all parameter groups.
        next_learning_rate: learning rate of the optimizer for the next step, without any scale.
    """

    squared_norm: float
    progress: float
    squared_step: float
    learning_rate: float
    next_learning_rate: float


class UpdateApplied(NamedTuple):
    """Measured step of an update, if its `Apply` asked for it; no other event comes between the two.

    Attributes:
        version: version that the update has made.
    """

    now: float
    version: int
    step: Step


class Joined(NamedTuple):
    """A worker has joined and can receive work."""

    now: float
    worker: int


class Lost(NamedTuple):
    """A worker is lost, and its work with it."""

    now: float
    worker: int
    reason: str


class Timer(NamedTuple):
    """A time that a `SetTimer` asked for."""

    now: float


class Evaluated(NamedTuple):
    """Metrics of a version."""

    now: float
    version: int
    metrics: Mapping[str, float]


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


Event = Arrival | UpdateApplied | Joined | Lost | Timer | Evaluated | AbortRun | Restarted


# --- commands ---------------------------------------------------------------------------------------------


class Compute(NamedTuple):
    """Assign work to a worker: the gradient of a minibatch at a version."""

    worker: int
    version: int
    draw: int
    minibatch: Minibatch | None = None


class Interrupt(NamedTuple):
    """Cancel the work of a worker."""

    worker: int
    draw: int


class Accept(NamedTuple):
    """Add the gradient that has just arrived to the update in progress.

    Attributes:
        step_scale: factor on its weight, which is its number of samples.
    """

    worker: int
    draw: int
    staleness: int
    samples: int
    step_scale: float = 1.0


class Drop(NamedTuple):
    """Discard the gradient that has just arrived.

    Attributes:
        staleness: staleness in versions; None for cancelled work, whose version is not stored.
        reason: reason for the log.
    """

    worker: int
    draw: int
    staleness: int | None
    reason: str


class Apply(NamedTuple):
    """Make an update of the accepted gradients and publish it as a version.

    Attributes:
        version: number of the new version.
        gradients: accepted gradients, in the order of their arrival.
        lr_scale: factor on the learning rate of the optimizer in this step.
        reason: why the update is made now, for the log.
        measure: whether the engine must report an `UpdateApplied` at once.
        step_scale: mean of the gradients' step scales; factor on their mean, in which each has its step scale.
        momentum_limit: largest momentum of this step.
        weight_decay_scale: factor on the weight decay of the optimizer in this step.
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
    """Replace a worker by a new one, where the engine can start workers; a `Lost` and a `Joined` follow."""

    worker: int


class Evaluate(NamedTuple):
    """Evaluate a version on the evaluation data."""

    version: int


class SetTimer(NamedTuple):
    """Report a `Timer` at this time, in seconds since the run began."""

    at_s: float


class Decision(NamedTuple):
    """Decision for the log; the engine does nothing.

    Attributes:
        kind: word that all decisions of a sort share, for example "quorum".
        reason: text of the decision.
        worker: number of the worker that the decision is about; None for none.
        k: chosen quorum; None for none.
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
