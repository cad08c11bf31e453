"""Update of the parameters, from the command to its records; a new field is added here only."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from typing import NamedTuple

from paceline.core.gradient import Accept


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
        momentum_power: exponent of the momentum of SGD in this step; the rate of a whole movement stays the same.
        minibatches: number of whole minibatches whose samples the gradients have, if they are parts of them; else 0.
        is_skipped: whether the parameters stay as they are, since a gradient of the update is not finite.
    """

    version: int
    gradients: tuple[Accept, ...]
    lr_scale: float
    reason: str
    measure: bool = False
    step_scale: float = 1.0
    momentum_limit: float = inf
    weight_decay_scale: float = 1.0
    momentum_power: float = 1.0
    minibatches: int = 0
    is_skipped: bool = False

    @property
    def workload(self) -> int:
        """Number of minibatches in the update."""
        return self.minibatches or sum([gradient.minibatches for gradient in self.gradients])


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


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMade:
    """Update made of k gradients.

    Attributes:
        version: number of the new version.
        k: number of gradients.
        workload: number of gradients accepted so far.
        samples: number of samples of these gradients.
        loss: mean loss of these gradients, each at its own version.
        learning_rate: learning rate of this step, of the first parameter group.
        staleness: mean staleness of these gradients, in versions.
        max_staleness: largest staleness of these gradients, in versions.
        reason: why the update was made at this time.
        busy_s: worker-seconds of work so far.
        live_s: worker-seconds of live workers so far.
        step_scale: factor of the compensators on the step.
    """

    now_s: float
    version: int
    k: int
    workload: int
    samples: int
    loss: float
    learning_rate: float
    staleness: float
    max_staleness: int
    reason: str
    busy_s: float
    live_s: float
    step_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """Measured step of an update; see `Step`.

    Attributes:
        version: number of the new version.
    """

    now_s: float
    version: int
    squared_norm: float
    progress: float
    squared_step: float
    learning_rate: float
    next_learning_rate: float
    event_s: float = nan

    @property
    def step(self) -> Step:
        """Step of the event."""
        return Step(**{name: getattr(self, name) for name in Step._fields})

    @property
    def event(self) -> UpdateApplied:
        """Event of this record."""
        return UpdateApplied(self.event_s, self.version, self.step)
