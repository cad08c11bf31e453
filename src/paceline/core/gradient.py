"""Gradient of a worker, from its arrival to its record; a new field is added here only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from paceline.core.bounds import MOST_COMPENSATORS, CountOrNone, Seconds, Weight, Whole

NOT_FINITE = "not finite"
OLD_DRAW = "finished after its interrupt"
SKIPPED = "its loop skipped the step"
OVERFLOW = "its loop skipped the step, because the gradient is not finite"
NOTICE = "its worker sent a notice in its place, because an update had made it too stale"


def mean_by_samples(values: Collection[float], samples: Collection[int]) -> float:
    """Return the mean of a scalar of gradients, each weighed by its samples.

    >>> mean_by_samples([1.0, 2.0], [3, 1])
    1.25
    """
    if len(set(samples)) == 1:
        return sum(values) / len(values)
    return sum(value * count for value, count in zip(values, samples, strict=True)) / sum(samples)


class Compensation(NamedTuple):
    """Compensation of a stale gradient.

    Attributes:
        formula: formula in text.
        factor: applied factor: a step scale, or the lambda of a correction.
    """

    formula: str
    factor: float


Compensations = Annotated[tuple[Compensation, ...], Meta(max_length=MOST_COMPENSATORS)]


class StepPlace(NamedTuple):
    """Place of a step in a loop with several optimizers, by which it is known whether ranks are at the same one.

    Attributes:
        optimizer: number of the optimizer that steps, counted from 1.
        turn: number of the step among those in a row of this optimizer, counted from 1.
        position: number of the step among those of its iteration, counted from 1.
    """

    optimizer: Whole
    turn: Whole
    position: Whole


NO_STEP = StepPlace(0, 0, 0)


class Measured(NamedTuple):
    """What a worker has measured of one gradient.

    Attributes:
        loss: mean loss of the minibatch; nan if it is not known.
        samples: number of samples in the minibatch.
        squared_norm: squared norm of the gradient.
        variance: variance of the gradient, estimated from its microbatches; nan without microbatches.
        finite: whether loss and gradient are finite.
        compute_s: seconds of forward and backward pass, with injected slowness, without waiting for other workers. A
            real worker without a server includes its own step.
        skipped: whether the loop of an attached worker skipped the step, so that there is no gradient.
        minibatches: number of minibatches, each with a local step; 0 if a loop has computed the gradient from the batch
            of an earlier one, so that the minibatch of its work is still unread.
        weight: what the gradient counts in the mean of an update, > 0, as the job or the loop says; None for its
            samples.
        overflowed: whether the step was skipped because the gradient was not finite, as a GradScaler does.
        step_place: place of its step in a loop with several optimizers, zeros if there is no gradient, as the loop
            waits for a batch; None in a loop with one.
    """

    loss: float
    samples: CountOrNone
    squared_norm: float
    variance: float
    finite: bool
    compute_s: Seconds
    skipped: bool = False
    minibatches: CountOrNone = 1
    weight: Weight | None = None
    overflowed: bool = False
    step_place: StepPlace | None = None

    @property
    def mean_weight(self) -> float:
        """What the gradient counts in the mean of an update."""
        return self.samples if self.weight is None else self.weight


NOT_MEASURED = Measured(loss=nan, samples=1, squared_norm=nan, variance=nan, finite=True, compute_s=0.0)


class Arrival(NamedTuple):
    """Arrival of a gradient, or of a notice that one is complete, which a real worker sends if it cannot be used.

    Attributes:
        now: time of the event, in seconds since the run began.
        worker: number of the worker.
        draw: number of the work of this worker.
        measured: what the worker has measured.
        pull_s: seconds to receive the parameters.
        push_s: seconds to send the gradient.
        step_scale: factor that the compensators give it.
        compensations: what each compensator did.
        sum_s: seconds of the all-reduce that includes it, after the last contribution; 0 before the first one, nan
            with a server. Only rank 0 measures it and the next field; both are for the log only.
        left_over_s: seconds in which real ranks without a server neither computed nor waited.
        unsent_s: seconds that sending the gradient would have taken, if only a notice has arrived, estimated from the
            latest gradient of its worker; nan if the gradient itself has arrived.
    """

    now: float
    worker: int
    draw: int
    measured: Measured = NOT_MEASURED
    pull_s: float = 0.0
    push_s: float = 0.0
    step_scale: float = 1.0
    compensations: Compensations = ()
    sum_s: float = nan
    left_over_s: float = 0.0
    unsent_s: float = nan

    @property
    def is_notice(self) -> bool:
        """Whether the gradient itself was not sent."""
        return not isnan(self.unsent_s)

    @property
    def complete_s(self) -> float:
        """Time at which the gradient has arrived, or would have arrived in place of its notice."""
        return self.now if isnan(self.unsent_s) else self.now + self.unsent_s


class Accept(NamedTuple):
    """Add the gradient that has just arrived to the update in progress.

    Attributes:
        step_scale: factor on its weight.
        minibatches: number of minibatches, its share of the workload.
        own_weight: weight that the job or the loop has given it; None for its samples.
        step_place: place of its step in the loop, as in `Measured`.
    """

    worker: int
    draw: int
    staleness: int
    samples: int
    step_scale: float = 1.0
    minibatches: int = 1
    own_weight: Weight | None = None
    step_place: StepPlace | None = None

    @property
    def weight(self) -> float:
        """What it counts in the mean of an update."""
        return self.samples if self.own_weight is None else self.own_weight

    @classmethod
    def of(cls, arrival: Arrival, staleness: int) -> Accept:
        """Return the command for an arrival."""
        measured = arrival.measured
        return tuple.__new__(  # all fields in order, in a third of the time of keywords, for each gradient
            cls,
            (
                arrival.worker,
                arrival.draw,
                staleness,
                measured.samples,
                arrival.step_scale,
                measured.minibatches,
                measured.weight,
                measured.step_place,
            ),
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientArrived:
    """Arrival of a gradient, and whether it was used, flat as in the log. See `Arrival` for more on its fields.

    Attributes:
        version: version that the gradient was computed at.
        started_s: time at which the work was assigned, in seconds.
        staleness: staleness in versions.
        used: whether the gradient was accepted.
        reason: why it was dropped; empty if it was used.
        crossed_interrupt: whether its work was cancelled before; it counts as interrupted work.
        event_s: time of the event, in seconds; ``now_s`` is the time at which the server had handled it.
        compensations: formula and applied factor of each compensator.
        step_place: numbers of its `StepPlace`; empty in a loop with one optimizer.
    """

    now_s: float
    worker: int
    draw: int
    version: int
    started_s: float
    staleness: int
    used: bool
    reason: str
    loss: float
    samples: int
    squared_norm: float
    pull_s: float
    compute_s: float
    push_s: float
    crossed_interrupt: bool = False
    event_s: float = nan
    variance: float = nan
    step_scale: float = 1.0
    compensations: Sequence[tuple[str, float]] = ()
    sum_s: float = nan
    left_over_s: float = 0.0
    minibatches: int = 1
    unsent_s: float = nan
    weight: float | None = None
    step_place: Sequence[int] = ()

    @classmethod
    def of(cls, arrival: Arrival, command: Accept | Drop, **facts: Any) -> GradientArrived:
        """Return the record of an arrival and the command that answered it.

        Args:
            arrival: the event.
            command: acceptance or drop.
            facts: fields that neither has.
        """
        reason = command.reason if isinstance(command, Drop) else ""
        return cls(
            used=isinstance(command, Accept),
            reason=reason,
            crossed_interrupt=reason == OLD_DRAW,
            event_s=arrival.now,
            **{
                **{name: getattr(arrival, name) for name in _OF_ARRIVAL},
                **{name: getattr(arrival.measured, name) for name in _OF_MEASURED},
                "compensations": [tuple(each) for each in arrival.compensations],
                "step_place": list(arrival.measured.step_place or ()),
                **facts,
            },
        )

    @property
    def event(self) -> Arrival:
        """Event of this record."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _OF_ARRIVAL}
        fields["compensations"] = tuple(Compensation(*each) for each in self.compensations)
        has_overflowed = self.reason == OVERFLOW
        is_skipped = self.reason == SKIPPED or has_overflowed
        is_finite = self.reason != NOT_FINITE and not is_skipped
        measured = {name: getattr(self, name) for name in _OF_MEASURED}
        measured["step_place"] = StepPlace(*self.step_place) if self.step_place else None
        fields["measured"] = Measured(finite=is_finite, skipped=is_skipped, overflowed=has_overflowed, **measured)
        return Arrival(now=self.event_s, **fields)


_OF_ARRIVAL = tuple(name for name in Arrival._fields if name in GradientArrived.__dataclass_fields__)
_OF_MEASURED = tuple(name for name in Measured._fields if name in GradientArrived.__dataclass_fields__)
