"""Settings of a coordinator beside plan and stop condition."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.duration import Duration
from paceline.policies.learning_rate import LRScaling, ScheduleCurve
from paceline.policies.noise_rule import NoiseRule


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """Settings that a run is replayed with.

    Args:
        per_epoch: gradients of one epoch; None if the data have no length.
        learning_rate: rule for the learning rate of an update of k gradients.
        schedule: scale of learning rate and weight decay by workload; None for a constant one.
        evaluate_every: updates, gradients or seconds between evaluations; None for no evaluation.
        measure_steps: whether every step is measured, even if no controller reads steps.
        batch_size: samples of a minibatch; None where only times are simulated.
        noise: reference of the learning-rate rule "noise"; None for another rule.
    """

    per_epoch: float | None = None
    learning_rate: LRScaling = field(default_factory=LRScaling)
    schedule: ScheduleCurve | None = None
    evaluate_every: Duration | None = None
    measure_steps: bool = False
    batch_size: int | None = None
    noise: NoiseRule | None = None


DEFAULT = CoordinatorSettings()
