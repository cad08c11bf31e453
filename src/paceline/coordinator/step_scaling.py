"""Scales of learning rate and weight decay of an update."""

from __future__ import annotations

from paceline.policies.learning_rate import LRScaling, Scales, ScheduleCurve, ScheduleTracker
from paceline.policies.noise_rule import NoiseScaling, NoiseTracker
from paceline.utils.state_dict import Stateful


class StepScaling(Stateful):
    """Multiplies the rule for k gradients by the schedule.

    Args:
        learning_rate: rule for the number of gradients in an update.
        schedule: scale by workload; None for a constant one.
        noise: state of the rule "noise"; None for another rule.

    Attributes:
        schedule: state of the schedule; None without one.
        noise: state of the rule "noise"; None for another rule.

    Example:
        >>> StepScaling(LRScaling("proportional"), None).scales(k=2, live=4, workload=0)
        Scales(lr=0.5, weight_decay=1.0)
    """

    _parts = ("schedule", "noise")

    def __init__(
        self, learning_rate: LRScaling, schedule: ScheduleCurve | None, noise: NoiseTracker | None = None
    ) -> None:
        self._learning_rate = learning_rate
        self.schedule = ScheduleTracker(schedule) if schedule is not None else None
        self.noise = noise

    @property
    def learning_rate(self) -> LRScaling | NoiseScaling:
        """Rule for the number of gradients in an update."""
        return self._learning_rate if self.noise is None else self.noise.scaling

    def scales(self, k: int, live: int, workload: int) -> Scales:
        """Return the scales of an update.

        Args:
            k: number of gradients, >= 1.
            live: number of live workers.
            workload: number of gradients applied before.
        """
        scale = self.learning_rate.scale(k, live or 1)
        if self.schedule is None:
            return Scales(scale)
        scheduled = self.schedule.scales(workload, k)
        return scheduled._replace(lr=scale * scheduled.lr)

    def momentum_power(self, k: int) -> float:
        """Return the exponent of the momentum in an update of k gradients."""
        return self.noise.scaling.momentum_power(k) if self.noise is not None else 1.0

    def schedule_scale(self, workload: int) -> float:
        """Return the scale that the schedule gives an update of one gradient."""
        return self.schedule.scales(workload, 1).lr if self.schedule is not None else 1.0
