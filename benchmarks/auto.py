"""The learning-rate rule "noise" and `auto` on noisy quadratics, against statics that have their own tuned rate.

    python benchmarks/auto.py --part rates --workers 16
    python benchmarks/auto.py --part protocols --workers 16
    python benchmarks/auto.py --part same_rule --workers 16
    python benchmarks/auto.py --part drift --workers 16 --spectra log
    python benchmarks/auto.py --part healthy --workers 16

Each cell is a cluster, a noise level and a spectrum (`quadratics.py`). The learning rate of BSP is tuned on a grid of
2^(1/4), and is all that the rule and `auto` are given. Each static has the best rate of the same grid. Times are those
at which the mean loss of all replicas of the noise reaches 0.1 % of the first loss; a ratio below 1 is faster than the
tuned static. The constants of the rule were chosen with n = 16 and noise 0.03 and 0.1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp, inf, log
from statistics import fmean, quantiles
from typing import Any

import paceline as pl
from common import options, report
from paceline.catalogue.parser import parse_plan
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.settings import CoordinatorSettings
from paceline.core import events
from paceline.core.stop import Stop
from paceline.engines.virtual.timing import TimingEngine
from paceline.errors import PacelineWarning
from paceline.policies.learning_rate import LRScaling
from paceline.policies.noise_rule import NoiseRule
from quadratics import Quadratic, QuadraticEngine, Update, tuned_time

RATES = [2.0 ** (power / 4) for power in range(-28, 5)]
NOISES = (0.03, 0.1, 0.2)
GRADIENTS = 60_000  # of a schedule
LONGEST = 3.0  # of the time of the best static, after which a run is given up


def schedule(plan: str, cluster: pl.Cluster) -> list[Update]:
    """Return the updates of a protocol on a cluster."""
    updates: list[Update] = []
    engine = TimingEngine(cluster, seed=0)
    coordinator = Coordinator(parse_plan(plan), workers=cluster.n, stop=Stop(gradients=GRADIENTS))

    def observe(now: float, event: events.Event | None, commands: Sequence[events.Command]) -> None:
        made = (command for command in commands if isinstance(command, events.Apply))
        updates.extend(Update(engine.now, tuple(each.staleness for each in update.gradients)) for update in made)

    with engine:
        engine.run(coordinator, observe)
    return updates


def time_by_rule(
    plan: str, cluster: pl.Cluster, problem: Quadratic, rate: float, longest_s: float, replicas: int
) -> float:
    """Return the time at which the mean loss of all replicas under the rule reaches the target; inf for never."""
    changes = []
    for replica in range(replicas):
        engine = QuadraticEngine(cluster, problem, rate, seed=0, noise_seed=100 + replica)
        settings = CoordinatorSettings(learning_rate=LRScaling("noise"), noise=NoiseRule(cluster.n, rate))
        stop = Stop(seconds=longest_s)
        with engine:
            engine.run(Coordinator(parse_plan(plan), workers=cluster.n, stop=stop, settings=settings))
        before = 0.0
        for at_s, loss in engine.losses:
            changes.append((at_s, loss - before))
            before = loss
    total = 0.0
    for at_s, change in sorted(changes):
        total += change
        if at_s > 0 and total / replicas <= problem.target:
            return at_s
    return inf


def clusters(n: int) -> dict[str, pl.Cluster]:
    """Return ten clusters with a mean round trip of about a second."""
    usual, few = pl.Gamma(16, 1.0), max(1, n // 8)
    return {
        "uniform": pl.Cluster(n, pl.Uniform(0.98, 1.02)),
        "shifted": pl.Cluster(n, pl.ShiftedExponential(0.3, 0.7)),
        "exponential": pl.Cluster(n, pl.Exponential(1.0)),
        "pareto": pl.Cluster(n, pl.Pareto(0.2, 1.2)),
        "an eighth slow": pl.Cluster(n, usual, speed=[0.2] * few + [1.0] * (n - few)),
        "half slow": pl.Cluster(n, usual, speed=[1 / 3] * (n // 2) + [1.0] * (n - n // 2)),
        "ladder": pl.Cluster(n, usual, speed=[1 / 8 + 7 / 8 * i / (n - 1) for i in range(n)]),
        "one fast": pl.Cluster(n, usual, speed=[8.0] + [1.0] * (n - 1)),
        "transient": pl.Cluster(n, usual, transient=pl.Transient(slowdown=10.0, mean_on_s=20.0, mean_off_s=180.0)),
        "drift": pl.Cluster(n, usual, slowdowns=[pl.Slowdown(at_s=40, until_s=70, factor=5, workers=0.5)]),
    }


def drifts(n: int) -> dict[str, pl.Cluster]:
    """Return three clusters in which the best protocol changes.

    While one worker is 20 times faster than the others, updates of its fresh gradients are best: all other gradients
    are stale when they arrive. While all workers are equally fast, these updates waste the work of all but one.
    """

    def faster(slow: pl.Slowdown | pl.Periodic) -> pl.Cluster:
        return pl.Cluster(n, pl.Uniform(0.98, 1.02), slowdowns=[slow])

    return {
        "one fast at first": faster(pl.Slowdown(at_s=0, until_s=15, factor=1 / 20, workers=(0,))),
        "one fast in between": faster(pl.Slowdown(at_s=30, until_s=45, factor=1 / 20, workers=(0,))),
        "one fast at times": faster(pl.Periodic(on_s=15, every_s=60, slowdown=1 / 20, workers=(0,))),
    }


def ruled(n: int) -> list[str]:
    """Return the ten protocols whose rate the rule sets."""
    fresh = [f"k_sync(k={n // 2})", f"k_sync(k={n // 4})", "pull(k=1)", f"pull(k={n // 4})", f"pull(k={n})"]
    stale = [f"k_async(k={n // 2})", f"k_async(k={n // 4})", f"k_batch_async(k={n // 4})", "asp", "ssp(lead=4)"]
    return fresh + stale


def statics(n: int) -> list[str]:
    """Return the thirteen protocols that `auto` is compared with."""
    fresh = [*(f"k_sync(k={k})" for k in (3 * n // 4, n // 2, n // 4)), f"pull(k={n // 4})", "pull(k=1)"]
    batch = [f"k_batch_sync(k={n})", f"k_batch_sync(k={n // 2})"]
    stale = [f"{family}(k={k})" for family in ("k_async", "k_batch_async") for k in (n // 2, n // 4)]
    return ["bsp", "asp", *fresh, *batch, *stale]


def rates(n: int, spectra: Sequence[str], replicas: int) -> Iterator[tuple[str, float]]:
    """Yield the ratio of the time under the rule to that of the tuned rate, for each protocol and cell."""
    cluster = clusters(n)["shifted"]
    schedules = {plan: schedule(plan, cluster) for plan in ("bsp", *ruled(n))}
    for problem in (Quadratic(spectrum, noise) for spectrum in spectra for noise in NOISES):
        _, rate = tuned_time(problem, schedules["bsp"], RATES, seed=1)
        for plan in ruled(n):
            tuned_s, _ = tuned_time(problem, schedules[plan], RATES, seed=1)
            by_rule_s = time_by_rule(plan, cluster, problem, rate, LONGEST * tuned_s, replicas)
            yield f"{problem.spectrum}, noise {problem.noise}, {plan}", by_rule_s / tuned_s


def protocols(n: int, spectra: Sequence[str], replicas: int) -> Iterator[tuple[str, float]]:
    """Yield the ratio of the time of `auto` to that of the best tuned static, for each cell."""
    return against(statics(n), clusters(n), [Quadratic(each, noise) for each in spectra for noise in NOISES], replicas)


def drift(n: int, spectra: Sequence[str], replicas: int) -> Iterator[tuple[str, float]]:
    """Yield that ratio for clusters in which the best protocol changes."""
    return against(statics(n), drifts(n), [Quadratic(each, 0.1) for each in spectra], replicas)


def same_rule(n: int, spectra: Sequence[str], replicas: int) -> Iterator[tuple[str, float]]:
    """Yield the ratio of the time of `auto` to that of the best static under the same rule, for cells of noise 0.1."""
    for name, cluster in clusters(n).items():
        for problem in (Quadratic(spectrum, 0.1) for spectrum in spectra):
            bsp_s, rate = tuned_time(problem, schedule("bsp", cluster), RATES, seed=1)
            best, best_s = "bsp", LONGEST * bsp_s
            for plan in statics(n):
                ruled_s = time_by_rule(plan, cluster, problem, rate, best_s, replicas)
                if ruled_s < best_s:
                    best, best_s = plan, ruled_s
            auto_s = time_by_rule("auto", cluster, problem, rate, LONGEST * best_s, replicas)
            yield f"{name}, {problem.spectrum}, noise {problem.noise}, best {best}", auto_s / best_s


def healthy(n: int, spectra: Sequence[str], replicas: int) -> Iterator[tuple[str, float]]:
    """Yield the ratio of the time of `auto` to that of BSP, on workers that are equally fast."""
    uniform = {"uniform": clusters(n)["uniform"]}
    return against(["bsp"], uniform, [Quadratic(each, noise) for each in spectra for noise in NOISES], replicas)


def against(
    plans: Sequence[str], on: Mapping[str, pl.Cluster], problems: Sequence[Quadratic], replicas: int
) -> Iterator[tuple[str, float]]:
    """Yield the ratio of the time of `auto` to that of the best of some plans, BSP among them, for each cell."""
    for name, cluster in on.items():
        schedules = {plan: schedule(plan, cluster) for plan in plans}
        for problem in problems:
            best = "bsp"
            best_s, rate = tuned_time(problem, schedules[best], RATES, seed=1)
            for plan, updates in schedules.items():
                tuned_s, _ = tuned_time(problem, updates, RATES, seed=1, longest_s=best_s)
                if tuned_s < best_s:
                    best, best_s = plan, tuned_s
            auto_s = time_by_rule("auto", cluster, problem, rate, LONGEST * best_s, replicas)
            yield f"{name}, {problem.spectrum}, noise {problem.noise}, best {best}", auto_s / best_s


PARTS: Mapping[str, Callable[[int, Sequence[str], int], Iterator[tuple[str, float]]]] = {
    "rates": rates,
    "protocols": protocols,
    "same_rule": same_rule,
    "drift": drift,
    "healthy": healthy,
}


def summary(ratios: Mapping[str, float]) -> dict[str, Any]:
    """Return the geometric mean, the ninth decile, the worst and all ratios; those that were given up count as 3."""
    values = [min(ratio, LONGEST) for ratio in ratios.values()]
    return {
        "geometric_mean": exp(fmean(map(log, values))),
        "q90": quantiles(values, n=10)[-1],
        "worst": max(values),
        "given_up": sum(ratio == inf for ratio in ratios.values()),
        "ratios": {name: round(ratio, 3) if ratio < inf else None for name, ratio in ratios.items()},
    }


def main() -> None:
    """Measure one part and print it."""
    parser = options(__doc__ or "", rounds=16)
    parser.add_argument("--part", choices=list(PARTS), default="rates", help="what is measured")
    parser.add_argument("--workers", type=int, default=16, help="number of workers (default 16)")
    parser.add_argument("--spectra", nargs="+", default=["log", "square"], help="spectra (default log square)")
    given = parser.parse_args()
    warnings.simplefilter("ignore", PacelineWarning)
    found = summary(dict(PARTS[given.part](given.workers, given.spectra, given.rounds)))
    report(f"auto_{given.part}_{given.workers}", given, {"workers": given.workers, "replicas": given.rounds, **found})


if __name__ == "__main__":
    main()
