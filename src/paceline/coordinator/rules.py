"""Rules of a run: settings of its coordinator beside plan and stop, as `run.json` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self, get_args

from msgspec import Meta, Struct, ValidationError, convert, to_builtins
from msgspec.structs import fields

from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.failure_detector import FailureDetector, RoundTripFailureDetector
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.coordinator.settings import CoordinatorSettings
from paceline.core.bounds import MOST_WORKERS, Whole
from paceline.core.duration import Duration
from paceline.core.stop import Stop
from paceline.policies.learning_rate import LRScaling, ScheduleCurve
from paceline.policies.noise_rule import NoiseRule
from paceline.protocols.protocol import Plan
from paceline.utils.files import ContentError

SHOWN = 60  # characters of a wrong entry
# Entries that a resumed run may have anew, with the permission of the user.
CHANGEABLE = ("evaluate_every", "worker_timeout_s", "measure_steps", "schedule")


class Dealing(Struct, frozen=True, kw_only=True):
    """Arguments of `MinibatchSampler` but the minibatches of the whole run; early runs have fewer."""

    n: int
    per_epoch: int | None
    partitioned: bool
    requeue: bool = True
    ahead: int = 0

    def sampler(self, stop: Stop) -> MinibatchSampler:
        """Return the sampler of a run that ends at this stop."""
        per_run = (stop.epochs or 0) * (self.per_epoch or 0)
        return MinibatchSampler(
            self.n,
            per_epoch=self.per_epoch,
            partitioned=self.partitioned,
            requeue=self.requeue,
            per_run=int(per_run) if per_run and float(per_run).is_integer() else None,
            ahead=self.ahead,
        )


class Rules(Struct, frozen=True, kw_only=True):
    """Settings of a coordinator beside plan and stop.

    Attributes:
        workers: number of workers.
        per_epoch: gradients of one epoch; None if the data have no length.
        minibatches: how the coordinator assigns minibatches; None where each worker draws its own.
        learning_rate: rule for the learning rate of an update of k gradients.
        noise: reference of the learning-rate rule "noise"; None for another rule, and in early runs.
        schedule: learning-rate schedule in gradients; None for none.
        batch_size: samples of a minibatch; None in early runs.
        worker_timeout_s: timeout of the failure detector; None for none, or for one that is derived.
        derives_timeout: whether the timeout is derived from round trips.
        evaluate_every: interval between evaluations; None for no evaluation.
        measure_steps: whether each update records how far it moves the parameters.
    """

    workers: Annotated[int, Meta(ge=1, le=MOST_WORKERS, description=f"a whole number from 1 to {MOST_WORKERS}")]
    per_epoch: Annotated[Whole | None, Meta(description="a whole number")]
    minibatches: Annotated[Dealing | None, Meta(description="what says how minibatches are assigned")]
    learning_rate: Annotated[LRScaling, Meta(description="a rule for the learning rate")]
    noise: Annotated[NoiseRule | None, Meta(description="a reference of the rule noise")] = None
    schedule: Annotated[ScheduleCurve | None, Meta(description="a schedule in gradients")]
    batch_size: Annotated[Whole | None, Meta(description="a whole number")] = None
    worker_timeout_s: Annotated[Annotated[float, Meta(ge=0)] | None, Meta(description="seconds")]
    derives_timeout: Annotated[bool, Meta(description="true or false")]
    evaluate_every: Annotated[Duration | None, Meta(description="a unit and an amount")]
    measure_steps: Annotated[bool, Meta(description="true or false")]

    @classmethod
    def check(cls, content: Mapping[str, Any]) -> None:
        """Check the entries that are there.

        Raises:
            ContentError: one has a wrong type.
        """
        for field in fields(cls):
            if field.name in content:
                try:
                    convert(content[field.name], field.type)
                except ValidationError as error:
                    wanted = get_args(field.type)[-1].description
                    found = repr(content[field.name])[:SHOWN]
                    raise ContentError(f"rules {field.name} is {found}, expected {wanted}") from error

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Return the rules that `as_json` has given, and `check` has checked.

        Raises:
            UsageError: an entry is missing.
        """
        given = [each for each in fields(cls) if each.required or each.name in content]
        return cls(**{each.name: convert(content[each.name], each.type) for each in given})

    def as_json(self) -> dict[str, Any]:
        """Return the rules as plain JSON data."""
        content: dict[str, Any] = to_builtins(self)
        return content

    def coordinator(self, plan: Plan, stop: Stop, failure_detector: FailureDetector | None = None) -> Coordinator:
        """Return the coordinator of a run.

        Args:
            plan: phases of protocols, already checked.
            stop: conditions that end the run.
            failure_detector: timeout on silent workers; None for that of the rules.
        """
        return Coordinator(
            plan,
            workers=self.workers,
            stop=stop,
            settings=CoordinatorSettings(
                per_epoch=self.per_epoch,
                learning_rate=self.learning_rate,
                noise=self.noise,
                schedule=self.schedule,
                evaluate_every=self.evaluate_every,
                batch_size=self.batch_size,
                measure_steps=self.measure_steps,
            ),
            minibatches=None if self.minibatches is None else self.minibatches.sampler(stop),
            failure_detector=failure_detector or self._failure_detector(),
        )

    def _failure_detector(self) -> FailureDetector:
        return RoundTripFailureDetector() if self.derives_timeout else FailureDetector(self.worker_timeout_s)
