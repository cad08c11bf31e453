"""Learning rate of an update of k gradients, from the rate of a reference and the noise of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from typing import Any, ClassVar

from paceline.core.gradient import Measured
from paceline.core.update import Step
from paceline.policies.estimators.noise.critical_batch import LARGEST_PHI, CriticalBatch, UpdateStats
from paceline.policies.estimators.noise.minibatch_losses import MinibatchLosses
from paceline.policies.estimators.noise.staleness_price import PLAIN, Reference, StalenessPrice
from paceline.utils.state_dict import Stateful


@dataclass(frozen=True, kw_only=True)
class NoiseRule:
    """Learning-rate rule "noise": factor on the rate of a reference for an update of k gradients.

        eta(k) / eta = (k / K) (K + phi) / (k d + phi)

    The limits are "constant" for phi = 0 and "proportional" for phi = inf. An adaptive optimizer gets the square root
    of the factor: it divides by the size of gradients, which noise makes larger.

    Large phi means that noise has kept the rate of the reference below the limit of stability, by (K + phi) / K. For
    stale gradients of SGD this is believed up to a factor of 2: their rate is at most 2 / d of that of the reference,
    or of that of fresh gradients if this is larger. For phi says nothing about curvature, which grows in training
    until the reference is at its limit. With momentum this matters most: see ``StabilityScan``.

    Args:
        K: gradients of an update of the reference, >= 1; the number of workers of BSP.
        learning_rate: rate of the reference at the start.
        momentum: momentum of the optimizer in [0, 1); beta1 of Adam.
        adaptive: whether the optimizer divides by the size of past gradients.

    Example:
        >>> rule = NoiseRule(K=16, learning_rate=0.1)
        >>> [round(rule.scale(k=4, phi=phi), 2) for phi in (0.01, 16, 1e6)]
        [1.0, 0.4, 0.25]

    Source: for d = 1 the rate of McCandlish et al., "An empirical model of large-batch training", 2018, with another
    phi, see `CriticalBatch`; the square root is that of Malladi et al., "On the SDEs and scaling rules for adaptive
    gradient algorithms", 2022; that the curvature grows up to the limit of stability, Cohen et al., "Gradient descent
    on neural networks typically occurs at the edge of stability", 2021.
    """

    K: int
    learning_rate: float
    momentum: float = 0.0
    adaptive: bool = False

    def scale(self, k: int, phi: float, price: float = 1.0) -> float:
        """Return eta(k) / eta.

        Args:
            k: number of gradients, >= 1.
            phi: critical number of gradients, > 0; see `CriticalBatch`.
            price: price of staleness d, >= 1.
        """
        factor = k / self.K * (self.K + phi) / self.size(k, phi, price)
        return sqrt(factor) if self.adaptive else factor

    def size(self, k: float, phi: float, price: float = 1.0) -> float:
        """Return k d + phi, or more where the rate of stale gradients is limited.

        >>> rule = NoiseRule(K=8, learning_rate=0.1)
        >>> rule.size(k=1, phi=4.0, price=32.0), rule.size(k=1, phi=100.0, price=32.0)
        (36.0, 216.0)
        >>> rule.scale(k=1, phi=100.0, price=32.0) == 2 / 32
        True
        """
        size = k * price + phi
        return size if self.adaptive else max(size, price * (k + phi * min(1.0, k / self.K)) / LARGEST_SLACK)

    def progress(self, k: float, phi: float, price: float = 1.0, noise_scale: float | None = None) -> float:
        """Return the progress of a gradient in updates of k gradients.

            1 / (k d + phi)    or    1 / sqrt((k d + phi) (k d + B))

        An adaptive optimizer has the second one. Its first factor is that of the rate. The second factor is that of the
        gradient, which the optimizer divides by its size: a share k / (k + B) of its square is signal.

        Args:
            k: number of gradients of an update on average, >= 1.
            phi: critical number of gradients, > 0; see `CriticalBatch`.
            price: price of staleness d, >= 1.
            noise_scale: B of an adaptive optimizer; None for another one.
        """
        size = self.size(k, phi, price)
        return 1 / sqrt(size * (size if noise_scale is None else k * price + noise_scale))

    @property
    def reference(self) -> Reference:
        """Updates with which the price of staleness compares stale ones."""
        return PLAIN if self.adaptive else Reference.of_sgd(self.momentum, self.K)

    def with_momentum(self, price: float) -> float:
        """Return the price of staleness against the reference, times sqrt((1 + beta1) / (1 - beta1)) if adaptive.

        With fresh gradients, momentum makes larger steps stable, and with stale ones hardly. A tuned rate of an
        adaptive optimizer lies anywhere between both limits; this takes the geometric mean.
        """
        return price * sqrt((1 + self.momentum) / (1 - self.momentum)) if self.adaptive and price > 1 else price


@dataclass(frozen=True, kw_only=True)
class NoiseScaling:
    """Learning-rate scaling by `NoiseRule` at one time of a run.

    Attributes:
        rule: rule.
        phi: critical number of gradients.
        price: price of staleness.
        guard: additional factor, in (0, 1].
    """

    rule: NoiseRule
    phi: float
    price: float = 1.0
    guard: float = 1.0

    def scale(self, k: int, n: int) -> float:
        """Return the factor on the rate of the optimizer for k gradients; n workers do not matter."""
        return self.guard * self.rule.scale(k, self.phi, self.price)

    def momentum_power(self, k: int) -> float:
        """Return the exponent of the momentum of SGD in an update of k gradients, eta(k) / eta without the guard.

        An update then moves along the path of the reference, as many of its updates as the rate is of its rate. If
        noise limits the rate, the velocity keeps its half-life in gradients, and else in updates.
        """
        return 1.0 if self.rule.adaptive or not self.rule.momentum else self.rule.scale(k, self.phi, self.price)


class LossGuard(Stateful):
    """Guard against a rate that is too large: lowers it when the loss has risen.

    The factor is multiplied by 0.7 when the mean loss of about 48 gradients exceeds its least value, since the factor
    was lowered last, by half of it and 4 standard errors. After 192 gradients without that it is divided by 0.7 again.

    Attributes:
        factor: factor on the learning rate, in (0, 1].
    """

    _saved = ("factor", "_mean", "_square", "_count", "_least", "_quiet")

    def __init__(self) -> None:
        self.factor = 1.0
        self._mean = self._square = 0.0
        self._count = 0
        self._least = float("inf")
        self._quiet = 0

    def accept(self, loss: float) -> bool:
        """Add the loss of an accepted gradient; return whether the loss has risen."""
        self._count += 1
        self._quiet += 1
        weight = 1 / min(self._count, GUARD_GRADIENTS)
        self._mean += weight * (loss - self._mean)
        self._square += weight * (loss * loss - self._square)
        if self._count < GUARD_GRADIENTS:
            return False
        error = sqrt(max(0.0, self._square - self._mean * self._mean) / (2 * GUARD_GRADIENTS))
        self._least = min(self._least, self._mean)
        has_risen = self._mean > self._least + 0.5 * abs(self._least) + 4 * error
        if has_risen and self._quiet >= GUARD_GRADIENTS:
            self.factor *= GUARD_FACTOR
            self._least = self._mean
            self._quiet = 0
            return True
        if not has_risen and self._quiet >= QUIET_GRADIENTS and self.factor < 1:
            self.factor = min(1.0, self.factor / GUARD_FACTOR)
            self._quiet = 0
        return False


GUARD_GRADIENTS = 48
QUIET_GRADIENTS = 192
GUARD_FACTOR = 0.7


class NoiseTracker(Stateful):
    """State of `NoiseRule` during a run: estimates, price of staleness and guard.

    Args:
        rule: rule.
        has_steps: whether steps can be measured; a run without a server has none that all ranks know.

    Attributes:
        rule: rule.
        price: price of staleness.
        guard: guard against a rate that is too large.
        estimate: estimates of the latest update.
        has_risen: whether the guard has lowered the rate since the latest update.
    """

    _saved = ("has_risen", "_pending", "_latest", "_leases", "_since_step", "_logged", "_schedule_scale")
    _parts = ("price", "guard", "_critical", "_losses")
    _defaults: ClassVar[Mapping[str, Any]] = {"losses": None, "_leases": 0}  # missing in early runs

    def __init__(self, rule: NoiseRule, has_steps: bool = True) -> None:
        self.rule = rule
        self.price = StalenessPrice(rule.reference)
        self.guard = LossGuard()
        self.has_risen = False
        self._critical = CriticalBatch(rule.K, rule.learning_rate, rule.momentum, rule.adaptive)
        self._losses = MinibatchLosses()
        self._has_steps = has_steps
        self._schedule_scale = 1.0
        self.estimate = self._critical.estimate()
        self._pending = (0.0, 0.0)  # squared norms and samples of the gradients that are held
        self._latest = (0, nan, 1.0)  # minibatches, mean square and learning-rate scale of the latest update
        self._leases = 0  # gradients of the latest update, of parts of minibatches or of whole ones
        self._since_step = 0
        self._logged = (0.0, 0.0, 0.0)

    def accept(self, gradient: Measured, share: float = 1.0) -> None:
        """Add an accepted gradient, of a share of a minibatch in (0, 1]."""
        self._critical.accept(share * gradient.variance, gradient.squared_norm)
        for loss in self._losses.add(gradient.loss, share):
            self._critical.accept_loss(loss)
            self.has_risen |= self.guard.accept(loss)
        squares, samples = self._pending
        self._pending = (squares + gradient.samples * gradient.squared_norm, samples + gradient.samples)

    def make(self, stalenesses: tuple[int, ...], schedule_scale: float, minibatches: int = 0) -> None:
        """Add an update that is made now, before its learning rate is asked for.

        Args:
            stalenesses: staleness of each of its gradients.
            schedule_scale: factor on the learning rate of the optimizer.
            minibatches: number of minibatches of which these gradients are parts; 0 for a whole one each.
        """
        squares, samples = self._pending
        self._pending = (0.0, 0.0)
        self._schedule_scale = schedule_scale
        self.estimate = self._critical.estimate(schedule_scale)
        self.has_risen = False
        self._leases = len(stalenesses)
        k = minibatches or self._leases
        self.price.observe(stalenesses)
        self._latest = (k, squares / samples, schedule_scale * self.scaling.scale(k, k))

    def needs_step(self) -> bool:
        """Return whether the step of the update that is made now is to be measured: every one at first, then some."""
        self._since_step += 1
        if not self._has_steps or (self._since_step < MEASURE_EVERY and self._critical.steps >= FIRST_STEPS):
            return False
        self._since_step = 0
        return True

    def finish(self, step: Step) -> None:
        """Add the measured step of the latest update, unless only this rank knows it."""
        if not self._has_steps:
            return
        k, mean_square, lr_scale = self._latest
        update = UpdateStats(k=k, gradients=self._leases, mean_square=mean_square, step=step, lr_scale=lr_scale)
        self._critical.finish_update(update)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a tracker of the same rule."""
        super().load_state_dict(state)
        self.estimate = self._critical.estimate(self._schedule_scale)

    @property
    def scaling(self) -> NoiseScaling:
        """Scaling of the learning rate."""
        return NoiseScaling(
            rule=self.rule, phi=self.estimate.phi, price=self.price_of_staleness, guard=self.guard.factor
        )

    @property
    def price_of_staleness(self) -> float:
        """Price of staleness d, >= 1, with the momentum of the optimizer."""
        return self.rule.with_momentum(self.price.price)

    @property
    def explanation(self) -> str:
        """Text of the rule's numbers."""
        V, P, phi, _, assumed, _ = self.estimate
        k, _, scale = self._latest
        d = self.price_of_staleness
        price = f", price of staleness {d:.3g}" if d > 1 else ""
        guard = f", lowered by {self.guard.factor:.2g} because the loss rose" if self.guard.factor < 1 else ""
        because = f"; assumed: {assumed}" if assumed else ""
        limit = " (its limit, 19 K)" if phi > 0.999 * LARGEST_PHI * self.rule.K else ""
        numbers = f"variance {V:.3g}, loss to go {P:.3g}, phi {phi:.3g}{limit}"
        return f"{scale:.3g} of the given rate for k={k}: {numbers}{price}{guard}{because}"

    def change(self) -> dict[str, float]:
        """Return the numbers of the rule if one has changed by a tenth since they were returned last, else nothing."""
        k, _, scale = self._latest
        now = (self.estimate.phi, self.price_of_staleness, scale)
        if all(abs(new - old) <= 0.1 * abs(old) for new, old in zip(now, self._logged, strict=True)):
            return {}
        self._logged = now
        V, P, phi, *_ = self.estimate
        numbers = {"V": V, "P": P, "phi": phi, "d": now[1], "guard": self.guard.factor, "k": k, "scale": scale}
        return {name: number for name, number in numbers.items() if isfinite(number)}


LARGEST_SLACK = 2.0  # of a rate below the limit of stability, as far as it is believed
MEASURE_EVERY = 4
FIRST_STEPS = 16
