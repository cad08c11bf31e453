"""Which protocol and which K would have made a run's progress soonest, as its own gradients and round trips tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import inf, isfinite
from operator import attrgetter
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from paceline.catalogue import parse_plan
from paceline.cluster import Cluster
from paceline.cluster_text import parse_cluster
from paceline.errors import PacelineWarning, UsageError
from paceline.estimators.descent import Observed, noise, updates_needed
from paceline.estimators.gain import Told
from paceline.events import Step
from paceline.history import GradientArrived, History, StepMeasured, UpdateMade, mean_loss
from paceline.learning_rate import LearningRate
from paceline.protocols import Phase, Plan, Protocol, as_plan
from paceline.recording.run_folder import SavedRun
from paceline.timing import Trace
from paceline.train import simulate

PARTS = 5  # of a run: each is left out once, to see what hangs on it
LEAST_UPDATES = 4 * PARTS
UPDATES = 300  # simulated for each protocol


class Prediction(NamedTuple):
    """What one protocol would have done with the progress of the run.

    Attributes:
        protocol: as it would be typed.
        seconds_per_update: simulated.
        staleness: mean of its gradients', simulated.
        updates: that it would need; inf if it would not get there.
        seconds: both together, by which the protocols are ranked.
        low_s: the least seconds of five predictions, each by the noise of a fifth of the run, and the times without it.
        high_s: the most, likewise.
        wins: in how many of them it is the best.
    """

    protocol: str
    seconds_per_update: float
    staleness: float
    updates: float
    seconds: float
    low_s: float
    high_s: float
    wins: int


@dataclass(frozen=True)
class Advice:
    """Protocols from the soonest to the latest, and what the prediction rests on.

    Attributes:
        ranking: of all that were asked for.
        loss: before and after the updates that were looked at.
        noise: V / N, the variance of a gradient over the squared norm of the loss's own.
        curvature: h, in the directions of the noise.
    """

    ranking: Sequence[Prediction]
    loss: tuple[float, float]
    noise: float
    curvature: float

    @property
    def best(self) -> Prediction:
        """The one that would be there soonest."""
        return self.ranking[0]

    def text(self) -> str:
        """Return the ranking as a table of 80 columns, and a sentence on how sure it is."""
        before, after = self.loss
        lines = [
            f"Loss {before:.4g} to {after:.4g}; variance of a gradient {self.noise:.3g} x |grad|^2, curvature {self.curvature:.3g}.",
            "",
            f"{'protocol':24} {'s/update':>9} {'staleness':>9} {'updates':>9} {'seconds':>9}  low to high",
        ]
        for each in self.ranking:
            there = (
                f"{each.updates:9.4g} {each.seconds:9.4g}" if isfinite(each.seconds) else f"{'never':>9} {'never':>9}"
            )
            spread = f"{each.low_s:.3g} to {each.high_s:.3g}" if isfinite(each.low_s) else ""
            lines.append(f"{each.protocol:24} {each.seconds_per_update:9.4g} {each.staleness:9.3g} {there}  {spread}")
        return "\n".join([*lines, "", self.verdict()])

    def verdict(self) -> str:
        """Say which protocol is best, why, and how sure that is."""
        best = self.best
        if not isfinite(best.seconds):
            return "None of them makes progress at this learning rate; lower it."
        others = [each for each in self.ranking[1:] if isfinite(each.seconds)]
        lead = f", {others[0].seconds / best.seconds:.2f} x sooner than {others[0].protocol}" if others else ""
        return (
            f"{best.protocol}: {best.updates:.3g} updates of {best.seconds_per_update:.3g} s{lead}.\n"
            f"It is the best in {best.wins} of {PARTS} predictions, each by the gradients of another fifth of the run."
        )


def advise(
    run: str | Path | SavedRun,
    *,
    protocols: Sequence[str | Protocol | Phase] = (),
    cluster: str | Cluster | None = None,
    seed: int = 0,
) -> Advice:
    """Rank protocols by the time in which they would lower the loss as a recorded run did.

    The seconds per update of each are simulated on the round trips of the run. The updates that it needs follow from
    the gradients of the run (`estimators.descent`): the fewer and the staler the gradients of an update are, the higher
    above its path their noise keeps the loss.

    Args:
        run: folder of a run that was recorded with `measure_steps=True`, with updates of at least two gradients,
            because a single one does not tell its noise.
        protocols: to rank, with constant knobs; those of the papers with K = 1, 2, 4 ... n if none is given.
        cluster: whose times to take instead of the run's.
        seed: of the simulations.

    Raises:
        UsageError: the run does not tell what is needed; with what to type instead.
    """
    saved = run if isinstance(run, SavedRun) else SavedRun(run)
    given = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if given is not None and not isinstance(given, Cluster):
        raise UsageError(f"{cluster!r} runs in real time; give a simulated cluster such as '16*exp(mean=1)'")
    rules = saved.configuration["rules"]
    recorded = _Recorded(saved, LearningRate(**rules["learning_rate"]), rules["workers"])
    n = given.n if given else rules["workers"]
    plans = {str(plan): plan for plan in map(_plan, protocols or default_protocols(n))}
    trips = None if given else Trace.of(saved.history, source=str(saved.path))
    predictions: dict[str, list[_Times]] = {name: [] for name in plans}
    for fifth in (None, *range(PARTS)):
        times = given or Cluster(n, replace(_without(trips, fifth), censored="km"))
        for name, plan in plans.items():
            predictions[name].append(recorded.predict(plan, times, seed, fifth))
    return _ranked(predictions, recorded)


def read_updates(history: History, rate: LearningRate, n: int) -> Iterator[Observed]:
    """Yield what each update of a run has told, of those whose step was measured.

    Args:
        history: of the run.
        rate: by which its learning rate followed the quorum.
        n: workers.
    """
    used: list[GradientArrived] = []
    for record in history:
        if isinstance(record, GradientArrived) and record.used:
            used.append(record)
        elif isinstance(record, UpdateMade):
            made_of, used = used, []
        elif isinstance(record, StepMeasured):
            samples = sum(each.samples for each in made_of)
            loss, square, within, staleness = (
                sum(each.samples * value(each) for each in made_of) / samples for value in _MEANS
            )
            step = Step(
                record.squared_norm,
                record.progress,
                record.squared_step,
                record.learning_rate,
                record.next_learning_rate,
            )
            k = len(made_of)
            yield Observed(Told(k, loss, square, within, step), samples / k, staleness, rate.scale(k, n))


def default_protocols(n: int) -> list[str]:
    """Return the protocols of the papers, with K = 1, 2, 4 ... n, as they are typed."""
    ks = sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})
    families = ("k_sync", "k_batch_sync", "k_async", "k_batch_async")
    some = [f"{family}(k={k})" for family in families for k in ks if k < n or "batch" in family]
    return ["bsp", "asp", *(text for text in some if text not in ("k_async(k=1)", "k_batch_async(k=1)"))]


_MEANS: Sequence[Callable[[GradientArrived], float]] = (
    attrgetter("loss"),
    attrgetter("squared_norm"),
    attrgetter("variance"),
    attrgetter("staleness"),
)


class _Times(NamedTuple):
    """What was predicted for a protocol."""

    seconds_per_update: float
    staleness: float
    updates: float

    @property
    def seconds(self) -> float:
        return self.seconds_per_update * self.updates


class _Recorded:
    """A run, and what its gradients were like in the whole and in each fifth."""

    def __init__(self, saved: SavedRun, rate: LearningRate, n: int) -> None:
        self._rate = rate
        self.updates = updates = list(read_updates(saved.history, rate, n))
        _check(saved, updates)
        borders = [round(part * len(updates) / PARTS) for part in range(PARTS + 1)]
        around = max(1, len(updates) // (4 * PARTS))
        losses = [each.told.loss for each in updates]
        self.curve = [(b, mean_loss(losses[max(0, b - around) : b + around])) for b in borders]
        self.noise = noise(updates)
        self._noise_of = [noise(updates[first:after]) for first, after in pairwise(borders)]
        self._k = mean(each.told.k for each in updates)
        self._staleness = mean(each.staleness for each in updates)
        self._scale = mean(each.rate_scale for each in updates)

    def predict(self, plan: Plan, cluster: Cluster, seed: int, fifth: int | None) -> _Times:
        """Predict a protocol's way to the loss at the end of the run, by the noise of a fifth of it if one is given."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PacelineWarning)  # a trace may begin again
            simulated = simulate(plan, cluster, updates=UPDATES, seed=seed)
        k, staleness = simulated.totals.mean_k, simulated.totals.mean_staleness
        scale = self._rate.scale(max(1, round(k)), cluster.n)
        seen = self.noise if fifth is None else self._noise_of[fifth]
        own = seen.excess(self._k, self._staleness, self._scale)
        other = seen.excess(k, staleness, scale)
        shift = other - own if own < inf else 0.0
        updates = updates_needed(self.curve, shift) if shift < inf else inf
        return _Times(simulated.seconds_per_update, staleness, updates * self._scale / scale)


def _check(saved: SavedRun, updates: Sequence[Observed]) -> None:
    if len(updates) < LEAST_UPDATES:
        raise UsageError(
            f"{saved.path} tells of {len(updates)} measured steps, expected at least {LEAST_UPDATES}; record it with "
            "paceline train --measure-steps (measure_steps=True), or longer"
        )
    if any(isinstance(each, GradientArrived) and each.compensations for each in saved.history):
        raise UsageError(f"{saved.path}: compensators have changed its gradients; record a run without them")
    if sum(each.told.k > 1 for each in updates) < LEAST_UPDATES:
        raise UsageError(
            f"{saved.path}: its updates of a single gradient do not tell how noisy one is; record a run of a "
            "protocol with k >= 2"
        )


def _without(trace: Trace | None, part: int | None) -> Trace:
    """Return a trace without a fifth of each worker's rows."""
    assert trace is not None
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
            f"{plan} changes while it runs, or compensates; expected protocols with constant knobs, as k_sync(k=4)"
        )
    return plan


def _ranked(predictions: Mapping[str, Sequence[_Times]], recorded: _Recorded) -> Advice:
    winners = [min(predictions, key=lambda name: predictions[name][i].seconds) for i in range(1, PARTS + 1)]
    ranking = []
    for name, (whole, *rest) in predictions.items():
        seconds = [each.seconds for each in rest]
        ranking.append(Prediction(name, *whole, whole.seconds, min(seconds), max(seconds), winners.count(name)))
    noise = recorded.noise
    return Advice(
        sorted(ranking, key=attrgetter("seconds")),
        (recorded.curve[0][1], recorded.curve[-1][1]),
        noise.variance / noise.squared_norm if noise.squared_norm else inf,
        noise.curvature,
    )
