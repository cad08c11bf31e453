"""Recorded runs as `advise` reads them: noise, loss to go and phi, and the updates that another protocol needs."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, isfinite, nan
from statistics import mean
from typing import NamedTuple

from paceline.core.records import DecisionMade, GradientArrived, StepMeasured, UpdateMade
from paceline.errors import UsageError
from paceline.experiments.advise.result import PARTS, GradientSummary
from paceline.policies.estimators.dbw.gain import GainInput, variance_of
from paceline.policies.estimators.noise.convergence import (
    Noise,
    ObservedUpdate,
    energy_curvature,
    estimate_noise,
    loss_at_end,
    relative_updates,
)
from paceline.policies.estimators.noise.critical_batch import CriticalBatch, UpdateStats
from paceline.policies.estimators.noise.minibatch_losses import MinibatchLosses
from paceline.policies.learning_rate import LRScaling
from paceline.policies.noise_rule import NoiseRule
from paceline.recording.history import History, mean_loss
from paceline.recording.run_folder import SavedRun

LEAST_UPDATES = 4 * PARTS
PASSAGE = 0.5  # share of the mean excess at which a run passes its target
LARGEST_SHARE = 0.9  # of the floor in the loss to go of a run, because the run itself arrived
MOMENTUM = re.compile(r"(?:momentum=|betas=\()([0-9.e-]+)")


class Needs(NamedTuple):
    """What a protocol does, from its simulation.

    Attributes:
        k: mean number of gradients in an update.
        staleness: mean staleness in versions.
        price: price of staleness d.
        rate_scale: factor on the learning rate by the rule of the run, > 0.
    """

    k: float
    staleness: float
    price: float
    rate_scale: float


class ObservedRun(ABC):
    """Recorded run.

    Attributes:
        loss: losses before the first and after the last update.
        rate: rule of the learning rate.
        phi: critical number of gradients phi; with the rule "noise" its mean over the progress of the run.
        final_phi: phi at the end, by which `auto` would choose.
        rule: learning-rate rule "noise" of the run, or that of its optimizer.
    """

    is_noise_rule = False

    def __init__(self, saved: SavedRun, losses: Sequence[float], rule: NoiseRule) -> None:
        self.loss = _loss(saved, losses)
        self.rate = saved.rules.learning_rate
        self.rule = rule
        self.phi = self.final_phi = nan

    @abstractmethod
    def seen(self) -> GradientSummary:
        """Return the statistics of the gradients."""

    @abstractmethod
    def updates_needed(self, needs: Needs, fifth: int | None) -> float:
        """Return the updates of a protocol to the final loss, from every fifth update or from all; inf for never."""


class ConstantRateRun(ObservedRun):
    """Recorded run whose learning rate does not depend on its gradients.

    The updates to the loss that the run reached grow as the noise floor of a protocol comes near this loss
    (``policies.estimators.noise.convergence``).
    """

    def __init__(self, saved: SavedRun) -> None:
        updates = read_run(saved)
        losses = [each.gradients.loss for each in updates]
        rule = _reference(saved, updates)
        super().__init__(saved, losses, rule)
        self._count = len(updates)
        self._k = mean(each.gradients.k for each in updates)
        self._staleness = mean(each.staleness for each in updates)
        self._scale = mean(each.rate_scale for each in updates)
        self._fall, self._to_go = loss_at_end(losses)
        known = [each for each in updates if isfinite(variance_of(each.gradients))]
        late = known[len(known) // 2 :]
        self._noise = self._noise_of(late)
        self._parts = [self._noise_of(late[part::PARTS]) for part in range(PARTS)]
        self.phi = self.final_phi = _critical(saved, rule)

    def seen(self) -> GradientSummary:
        """Return the statistics of the gradients in the second half of the run."""
        N, V = self._noise.squared_norm, self._noise.variance
        return GradientSummary(loss=self.loss, noise=V / N if N else inf, curvature=self._noise.curvature, phi=self.phi)

    def updates_needed(self, needs: Needs, fifth: int | None) -> float:
        """Return the updates of a protocol to the final loss, from every fifth update or from all; inf for never."""
        noise = self._noise if fifth is None else self._parts[fifth]
        own = noise.excess(self._k, self._staleness, self._scale)
        other = noise.excess(needs.k, needs.staleness, needs.rate_scale)
        share = min(PASSAGE * own / self._to_go, LARGEST_SHARE)
        ratio = relative_updates(share * other / own if own else 0.0) / relative_updates(share)
        return self._count * ratio * self._scale / needs.rate_scale

    def _noise_of(self, updates: Sequence[ObservedUpdate]) -> Noise:
        noise = replace(estimate_noise(updates), curvature=energy_curvature(updates, self._fall))
        return noise.stable_at(self._staleness, self._scale)


class NoiseRuleRun(ObservedRun):
    """Recorded run whose learning rate followed the rule "noise", under any protocol, also `auto`.

    An update of k gradients made the progress k / (k d + phi), with the phi and d of that update, which are logged. A
    protocol makes S = Lambda / (K d + phi) in a second. So it needs the seconds Z / S for the progress Z of the run,
    where phi is the mean with the weights of the progress: Z is the sum of k / (k d + phi) over the updates.
    """

    is_noise_rule = True

    def __init__(self, saved: SavedRun) -> None:
        rule = saved.rules.noise
        assert rule is not None
        rows: list[tuple[float, float]] = []  # progress and phi of each update
        losses, phi, price, workload = [], nan, 1.0, 0
        for record in saved.history:
            if isinstance(record, DecisionMade) and record.kind == "learning_rate":
                numbers = record.numbers or {}
                phi, price = numbers.get("phi", phi), numbers.get("d", price)
            elif isinstance(record, UpdateMade) and isfinite(phi):
                k = _minibatches(record, workload)
                rows.append((k * rule.progress(k, phi, price), phi))
                losses.append(record.loss)
            if isinstance(record, UpdateMade):
                workload = record.workload
        if len(rows) < LEAST_UPDATES:
            raise UsageError(
                f"{saved.path} has {len(rows)} updates with the numbers of lr_rule='noise', expected at least "
                f"{LEAST_UPDATES}; record a longer run"
            )
        super().__init__(saved, losses, rule)
        self.final_phi = rows[-1][1]
        self._whole = _weighted(rows)
        self._parts = [_weighted(rows[part::PARTS]) for part in range(PARTS)]
        self._shares = [len(rows[part::PARTS]) / len(rows) for part in range(PARTS)]
        self.phi = self._whole[1]

    def seen(self) -> GradientSummary:
        """Return the losses and phi; the log has no other statistics of the gradients."""
        return GradientSummary(loss=self.loss, noise=nan, curvature=nan, phi=self.phi)

    def updates_needed(self, needs: Needs, fifth: int | None) -> float:
        """Return the updates of a protocol to the progress of the run, from every fifth update or from all."""
        progress, phi = self._whole if fifth is None else self._parts[fifth]
        share = 1.0 if fifth is None else self._shares[fifth]
        return progress / share / (needs.k * self.rule.progress(needs.k, phi, needs.price))


def observed_run(saved: SavedRun) -> ObservedRun:
    """Return a recorded run by the rule of its learning rate."""
    _check_common_steps(saved)
    return NoiseRuleRun(saved) if saved.rules.noise else ConstantRateRun(saved)


def read_run(saved: SavedRun) -> list[ObservedUpdate]:
    """Return the statistics of each update of a run.

    Raises:
        UsageError: too few updates have the data to estimate the noise of gradients.
    """
    _check_common_steps(saved)
    updates = list(read_updates(saved.history, saved.rules.learning_rate, saved.rules.workers))
    _check(saved, updates)
    return updates


def read_updates(history: History, rate: LRScaling, n: int) -> Iterator[ObservedUpdate]:
    """Yield the statistics of each update of a run with a measured step.

    Args:
        history: history of the run.
        rate: rule by which the learning rate followed the quorum.
        n: number of workers, >= 1.
    """
    for _, accepted, record in _measured(history):
        samples = sum(each.samples for each in accepted)
        loss, square, within, staleness = (
            sum(each.samples * getattr(each, name) for each in accepted) / samples
            for name in ("loss", "squared_norm", "variance", "staleness")
        )
        k = len(accepted)
        yield ObservedUpdate(
            gradients=GainInput(k=k, loss=loss, mean_square=square, within=within, step=record.step),
            samples=samples / k,
            staleness=staleness,
            rate_scale=rate.scale(k, n),
        )


def _measured(history: History) -> Iterator[tuple[int, list[GradientArrived], StepMeasured]]:
    """Yield the minibatches, the gradients and the step of each update with a measured step."""
    used: list[GradientArrived] = []
    accepted: list[GradientArrived] = []
    k = workload = 0
    for record in history:
        if isinstance(record, GradientArrived) and record.used:
            used.append(record)
        elif isinstance(record, UpdateMade):
            k, workload = _minibatches(record, workload), record.workload
            accepted, used = used, []
        elif isinstance(record, StepMeasured):
            yield k, accepted, record


def _minibatches(update: UpdateMade, workload: int) -> int:
    """Return of how many minibatches an update was, after this workload: its gradients may be of parts of them."""
    return min(update.k, update.workload - workload)


def _reference(saved: SavedRun, updates: Sequence[ObservedUpdate]) -> NoiseRule:
    """Return the reference that the rule "noise" would have taken for the job of a run."""
    identity, n = saved.configuration["identity"], saved.rules.workers
    optimizer, lr_of, first = str(identity["optimizer"]), identity.get("lr_of", "bsp"), updates[0]
    found = MOMENTUM.search(optimizer)
    rate = first.gradients.step.learning_rate / first.rate_scale
    K = lr_of if isinstance(lr_of, int) else n
    return NoiseRule(
        K=K, learning_rate=rate, momentum=float(found[1]) if found else 0.0, adaptive=not optimizer.startswith("SGD")
    )


def _critical(saved: SavedRun, rule: NoiseRule) -> float:
    """Return phi at the end of a run, as the rule "noise" estimates it."""
    critical = CriticalBatch(rule.K, rule.learning_rate, rule.momentum, rule.adaptive)
    losses, phi = MinibatchLosses(), nan
    for k, accepted, record in _measured(saved.history):
        samples = sum(each.samples for each in accepted)
        for each in accepted:
            share = 1.0 if len(accepted) == k else each.samples * k / samples
            critical.accept(share * each.variance, each.squared_norm)
            for loss in losses.add(each.loss, share):
                critical.accept_loss(loss)
        phi = critical.estimate().phi
        square = sum(each.samples * each.squared_norm for each in accepted) / samples
        scale = record.learning_rate / rule.learning_rate
        critical.finish_update(
            UpdateStats(k=k, gradients=len(accepted), mean_square=square, step=record.step, lr_scale=scale)
        )
    return phi


def _weighted(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the progress of some updates, and the mean of phi with its weights."""
    progress = sum(each for each, _ in rows)
    return progress, sum(each * phi for each, phi in rows) / progress


def _loss(saved: SavedRun, losses: Sequence[float]) -> tuple[float, float]:
    around = max(1, len(losses) // (4 * PARTS))
    before, after = mean_loss(losses[:around]), mean_loss(losses[-around:])
    if not after < before:
        raise UsageError(
            f"{saved.path}: the loss went from {before:.3g} to {after:.3g}, which is no progress; record a run "
            "with a falling loss: with another learning rate, or longer"
        )
    return before, after


def _check_common_steps(saved: SavedRun) -> None:
    if any(each["allreduce"] and each["allreduce"]["sums"] == "updates" for each in saved.configuration["plan"]):
        raise UsageError(
            f"{saved.path}: the workers of {saved.configuration['protocol']} take steps of their own, so its gradients "
            "do not belong to common steps; record a run of all_reduce or bsp with measure_steps=True"
        )


def _check(saved: SavedRun, updates: Sequence[ObservedUpdate]) -> None:
    if len(updates) < LEAST_UPDATES:
        raise UsageError(
            f"{saved.path} has {len(updates)} measured steps, expected at least {LEAST_UPDATES}; record a run with "
            "measure_steps=True, or a longer one"
        )
    if any(isinstance(each, GradientArrived) and each.compensations for each in saved.history):
        raise UsageError(f"{saved.path}: compensators have changed the gradients; record a run without compensators")
    if sum(isfinite(variance_of(each.gradients)) for each in updates) < LEAST_UPDATES:
        raise UsageError(
            f"{saved.path}: the noise cannot be estimated from updates of a single gradient; record a run of a "
            "protocol with k >= 2, or of a job with microbatches >= 2"
        )
