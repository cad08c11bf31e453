"""`advise`: rank protocols by the predicted time to the progress of a recorded run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from math import inf, isfinite, isinf, nan
from operator import attrgetter
from pathlib import Path
from statistics import mean

from paceline.catalogue.parser import parse_plan
from paceline.clusters.parser import parse_cluster
from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.trace import Trace
from paceline.core.records import GradientArrived, StepMeasured, UpdateMade
from paceline.errors import PacelineWarning, UsageError
from paceline.experiments.advise.result import PARTS, Advice, GradientSummary, Prediction
from paceline.policies.estimators.convergence import ObservedUpdate, estimate_noise, updates_needed
from paceline.policies.estimators.gain import GainInput, variance_of
from paceline.policies.learning_rate import LRScaling
from paceline.protocols.protocol import Phase, Plan, Protocol, as_plan
from paceline.recording.history import History, mean_loss
from paceline.recording.run_folder import SavedRun
from paceline.recording.validation import believed
from paceline.run.simulate import simulate
from paceline.utils.argument_types import checked_types

LEAST_UPDATES = 4 * PARTS
UPDATES = 300  # simulated for each protocol


@checked_types
def advise(
    run: str | Path | SavedRun | Trace,
    *,
    protocols: Sequence[str | Protocol | Phase] = (),
    cluster: str | Cluster | None = None,
    seed: int = 0,
) -> Advice:
    """Rank protocols by the predicted time in which they lower the loss as much as a recorded run.

    The seconds per update of each protocol are simulated with the round trips of the run. The number of updates follows
    from the gradients of the run (``policies.estimators.convergence``): fewer or staler gradients per update leave the
    loss higher.

    Args:
        run: folder of a run recorded with ``measure_steps=True``, with at least two gradients per update or with
            microbatches, because the noise of single gradients cannot be measured. Or a trace, or its file, which has
            times only.
        protocols: protocols to rank, with constant knobs; those of the papers with K = 1, 2, 4 ... n if none is given.
        cluster: simulated cluster whose times replace those of the run.
        seed: seed of the simulations, >= 0.

    Raises:
        UsageError: the run lacks the data that are needed; the message says how to record them.
    """
    with believed(getattr(run, "path", run)):
        trace, recorded = _read(run)
    given = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if given is not None and not isinstance(given, Cluster):
        raise UsageError(f"{cluster!r} runs in real time; give a simulated cluster, for example '16*exp(mean=1)'")
    if given is not None:
        _check_means(given)
    n = given.n if given else trace.workers
    plans = {str(plan): plan for plan in map(_plan, protocols or default_protocols(n))}
    predictions: dict[str, list[Prediction]] = {name: [] for name in plans}
    for fifth in (None, *range(PARTS)) if recorded else (None,):
        times = given or Cluster(n, replace(_without(trace, fifth), censored="km"))
        for name, plan in plans.items():
            predictions[name].append(_predict(plan, times, recorded, fifth, seed))
    return _ranked(predictions, recorded)


def _read(run: str | Path | SavedRun | Trace) -> tuple[Trace, _Recorded | None]:
    if isinstance(run, Trace):
        return run, None
    if not isinstance(run, SavedRun) and os.path.isfile(run):
        return Trace.from_csv(run), None
    saved = run if isinstance(run, SavedRun) else SavedRun(run)
    return Trace.of(saved.history, source=str(saved.path)), _Recorded(saved)


def read_run(saved: SavedRun) -> list[ObservedUpdate]:
    """Return the statistics of each update of a run.

    Raises:
        UsageError: too few updates have the data to estimate the noise of gradients.
    """
    rules = saved.configuration["rules"]
    updates = list(read_updates(saved.history, LRScaling(**rules["learning_rate"]), rules["workers"]))
    _check(saved, updates)
    return updates


def read_updates(history: History, rate: LRScaling, n: int) -> Iterator[ObservedUpdate]:
    """Yield the statistics of each update of a run with a measured step.

    Args:
        history: history of the run.
        rate: rule by which the learning rate followed the quorum.
        n: number of workers, >= 1.
    """
    used: list[GradientArrived] = []
    for record in history:
        if isinstance(record, GradientArrived) and record.used:
            used.append(record)
        elif isinstance(record, UpdateMade):
            accepted, used = used, []
        elif isinstance(record, StepMeasured):
            samples = sum(each.samples for each in accepted)
            loss, square, within, staleness = (
                sum(each.samples * getattr(each, name) for each in accepted) / samples
                for name in ("loss", "squared_norm", "variance", "staleness")
            )
            k = len(accepted)
            yield ObservedUpdate(
                GainInput(k, loss, square, within, record.step), samples / k, staleness, rate.scale(k, n)
            )


def default_protocols(n: int) -> list[str]:
    """Return the texts of the protocols of the papers, with K = 1, 2, 4 ... n."""
    ks = sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})
    families = ("k_sync", "k_batch_sync", "k_async", "k_batch_async")
    some = [f"{family}(k={k})" for family in families for k in ks if k < n or "batch" in family]
    return ["bsp", "asp", *(text for text in some if text not in ("k_async(k=1)", "k_batch_async(k=1)"))]


class _Recorded:
    """Loss curve and gradient noise of a recorded run, as a whole and for each fifth."""

    def __init__(self, saved: SavedRun) -> None:
        self.rate = LRScaling(**saved.configuration["rules"]["learning_rate"])
        updates = read_run(saved)
        borders = [round(part * len(updates) / PARTS) for part in range(PARTS + 1)]
        around = max(1, len(updates) // (4 * PARTS))
        losses = [each.gradients.loss for each in updates]
        self.curve = [(b, mean_loss(losses[max(0, b - around) : b + around])) for b in borders]
        (_, before), *_, (_, after) = self.curve
        if not after < before:
            raise UsageError(
                f"{saved.path}: the loss went from {before:.3g} to {after:.3g}, which is no progress; record a run "
                "with a falling loss: with another learning rate, or longer"
            )
        self.noise = estimate_noise(updates)
        self._noise_of = [estimate_noise(updates[first:after]) for first, after in pairwise(borders)]
        self._k = mean(each.gradients.k for each in updates)
        self._staleness = mean(each.staleness for each in updates)
        self._scale = mean(each.rate_scale for each in updates)

    def seen(self) -> GradientSummary:
        """Return the statistics of the gradients."""
        N, V = self.noise.squared_norm, self.noise.variance
        return GradientSummary((self.curve[0][1], self.curve[-1][1]), V / N if N else inf, self.noise.curvature)

    def updates_needed(self, k: float, staleness: float, rate_scale: float, fifth: int | None) -> float:
        """Return the updates that another protocol needs to the final loss, by the noise of a fifth or of all."""
        seen = (self.noise if fifth is None else self._noise_of[fifth]).stable_at(self._staleness, self._scale)
        shift = seen.excess(k, staleness, rate_scale) - seen.excess(self._k, self._staleness, self._scale)
        return updates_needed(self.curve, shift) * self._scale / rate_scale if shift < inf else inf


def _check(saved: SavedRun, updates: Sequence[ObservedUpdate]) -> None:
    recorded = saved.configuration["protocol"]
    if any(each["allreduce"] and each["allreduce"]["sums"] == "updates" for each in saved.configuration["plan"]):
        raise UsageError(
            f"{saved.path}: the workers of {recorded} take steps of their own, so its gradients do not belong to "
            "common steps; record a run of all_reduce or bsp with measure_steps=True"
        )
    if saved.configuration["rules"].get("noise"):
        raise UsageError(
            f"{saved.path}: the learning rate of {recorded} followed the noise, so its effect cannot be told from "
            "that of the updates; record a run with lr_rule='constant' and a static protocol"
        )
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


def _check_means(cluster: Cluster) -> None:
    if isinstance(cluster.timing, Trace):
        return
    for distribution in map(cluster.distribution_of, range(cluster.n)):
        if isinf(distribution.expectation_s):
            raise UsageError(
                f"{distribution} has an infinite mean, which cannot be simulated; give one with a finite mean"
            )


def _without(trace: Trace, part: int | None) -> Trace:
    """Return a trace without the given fifth of each worker's rows; the whole trace for None."""
    if part is None:
        return trace
    kept = []
    for _, own in groupby(trace.rows, key=attrgetter("worker")):
        rows = list(own)
        first, after = (round(i * len(rows) / PARTS) for i in (part, part + 1))
        kept += rows[:first] + rows[after:] if len(rows) > PARTS else rows
    return replace(trace, rows=kept)


def _plan(given: str | Protocol | Phase) -> Plan:
    plan = parse_plan(given) if isinstance(given, str) else as_plan(given)
    phase = plan.phases[0]
    if len(plan.phases) > 1 or phase.controllers or phase.compensators:
        raise UsageError(
            f"{plan} has phases, controllers or compensators; give protocols with constant knobs, as k_sync(k=4)"
        )
    if plan.allreduce is not None and plan.allreduce.sums == "updates":
        raise UsageError(
            f"the workers of {plan} take steps of their own, so its number of updates cannot be predicted; give "
            "protocols with common steps, as all_reduce or k_sync(k=4)"
        )
    return plan


def _predict(plan: Plan, cluster: Cluster, recorded: _Recorded | None, fifth: int | None, seed: int) -> Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PacelineWarning)  # a trace may repeat
        simulated = simulate(plan, cluster, updates=UPDATES, seed=seed)
    k, staleness, update_s = simulated.totals.mean_k, simulated.totals.mean_staleness, simulated.seconds_per_update
    updates = nan
    if recorded is not None:
        updates = recorded.updates_needed(k, staleness, recorded.rate.scale(max(1, round(k)), cluster.n), fifth)
    seconds = update_s * updates
    return Prediction(str(plan), update_s, k / update_s, staleness, updates, seconds, seconds, seconds, 0)


def _ranked(predictions: Mapping[str, Sequence[Prediction]], recorded: _Recorded | None) -> Advice:
    if recorded is None:
        only = [whole for [whole] in predictions.values()]
        return Advice(sorted(only, key=attrgetter("seconds_per_update")), None)
    winners = [min(predictions, key=lambda name: predictions[name][i].seconds) for i in range(1, PARTS + 1)]
    ranking = []
    for name, (whole, *parts) in predictions.items():
        seconds = [each.seconds for each in parts]
        ranking.append(whole._replace(low_s=min(seconds), high_s=max(seconds), wins=winners.count(name)))
    return Advice(sorted(ranking, key=attrgetter("seconds")), recorded.seen())
