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

A part takes hours: `--cells FOLDER` keeps each finished cell there, and measures only those that it lacks.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import exp, inf, log
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, NamedTuple

import paceline as pl
from common import options, report
from paceline.catalogue.parser import parse_plan
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.settings import CoordinatorSettings
from paceline.core import events
from paceline.core.stop import Stop
from paceline.engines.loop import RunLoop
from paceline.engines.virtual.timing import TimedWorkers
from paceline.errors import PacelineWarning
from paceline.policies.learning_rate import LRScaling
from paceline.policies.noise_rule import NoiseRule
from quadratics import BATCH, Quadratic, Quadratics, Update, tuned_time

RATES = [2.0 ** (power / 4) for power in range(-28, 5)]
NOISES = (0.03, 0.1, 0.2)
GRADIENTS = 60_000  # of a schedule
LONGEST = 3.0  # of the time of the best static, after which a run is given up
USUAL = 1.3  # of that time, in which most runs reach the target


class Cell(NamedTuple):
    """Cell of a part.

    Attributes:
        name: cluster, problem or protocol that no other cell of the part has.
        measure: returns the ratio of the two times, and what the other time was of.
    """

    name: str
    measure: Callable[[], tuple[float, str]]


Cells = Iterator[Cell]


@lru_cache(maxsize=13)  # the cells of a cluster follow one another
def schedule(plan: str, cluster: pl.Cluster) -> list[Update]:
    """Return the updates of a protocol on a cluster."""
    updates: list[Update] = []
    engine = TimedWorkers(cluster, seed=0)
    coordinator = Coordinator(parse_plan(plan), workers=cluster.n, stop=Stop(gradients=GRADIENTS))

    def observe(now: float, event: events.Event | None, commands: Sequence[events.Command]) -> None:
        made = (command for command in commands if isinstance(command, events.Apply))
        for update in made:
            fresh = (0,) * update.minibatches  # of which the gradients are parts
            updates.append(Update(engine.now, fresh or tuple(each.staleness for each in update.gradients)))

    with engine.loop() as loop:
        loop.run(coordinator, observe)
    return updates


def time_by_rule(
    plan: str, cluster: pl.Cluster, problem: Quadratic, rate: float, longest_s: float, replicas: int
) -> float:
    """Return the time at which the mean loss of all replicas under the rule reaches the target; inf for never."""
    changes = []
    for replica in range(replicas):
        timed = TimedWorkers(cluster, seed=0)
        parameters = Quadratics(timed, cluster.n, problem, rate, noise_seed=100 + replica)
        settings = CoordinatorSettings(
            learning_rate=LRScaling("noise"), noise=NoiseRule(K=cluster.n, learning_rate=rate), batch_size=BATCH
        )
        stop = Stop(seconds=longest_s)
        with RunLoop(timed, parameters, timed) as loop:
            loop.run(Coordinator(parse_plan(plan), workers=cluster.n, stop=stop, settings=settings))
        before = 0.0
        for at_s, loss in parameters.losses:
            changes.append((at_s, loss - before))
            before = loss
    total = 0.0
    for at_s, change in sorted(changes):
        total += change
        if at_s > 0 and total / replicas <= problem.target:
            return at_s
    return inf


def ratio_by_rule(
    plan: str, cluster: pl.Cluster, problem: Quadratic, rate: float, other_s: float, replicas: int
) -> float:
    """Return the ratio of the time under the rule to another time; inf above LONGEST."""
    for longest_s in (USUAL * other_s, LONGEST * other_s):
        found_s = time_by_rule(plan, cluster, problem, rate, longest_s, replicas)
        if found_s < inf:
            break
    return found_s / other_s


def clusters(n: int) -> dict[str, pl.Cluster]:
    """Return ten clusters with a mean round trip of about a second."""
    usual, few = pl.timing.Gamma(16, 1.0), max(1, n // 8)
    return {
        "uniform": pl.Cluster(n, pl.timing.Uniform(0.98, 1.02)),
        "shifted": pl.Cluster(n, pl.timing.ShiftedExponential(0.3, 0.7)),
        "exponential": pl.Cluster(n, pl.timing.Exponential(1.0)),
        "pareto": pl.Cluster(n, pl.timing.Pareto(0.2, 1.2)),
        "an eighth slow": pl.Cluster(n, usual, speed=[0.2] * few + [1.0] * (n - few)),
        "half slow": pl.Cluster(n, usual, speed=[1 / 3] * (n // 2) + [1.0] * (n - n // 2)),
        "ladder": pl.Cluster(n, usual, speed=[1 / 8 + 7 / 8 * i / (n - 1) for i in range(n)]),
        "one fast": pl.Cluster(n, usual, speed=[8.0] + [1.0] * (n - 1)),
        "transient": pl.Cluster(
            n, usual, transient=pl.timing.Transient(slowdown=10.0, mean_on_s=20.0, mean_off_s=180.0)
        ),
        "drift": pl.Cluster(n, usual, slowdowns=[pl.timing.Slowdown(at_s=40, until_s=70, factor=5, workers=0.5)]),
    }


def drifts(n: int) -> dict[str, pl.Cluster]:
    """Return three clusters in which the best protocol changes.

    While one worker is 20 times faster than the others, updates of its fresh gradients are best: all other gradients
    are stale when they arrive. While all workers are equally fast, these updates waste the work of all but one.
    """

    def faster(slow: pl.timing.Slowdown | pl.timing.Periodic) -> pl.Cluster:
        return pl.Cluster(n, pl.timing.Uniform(0.98, 1.02), slowdowns=[slow])

    return {
        "one fast at first": faster(pl.timing.Slowdown(at_s=0, until_s=15, factor=1 / 20, workers=(0,))),
        "one fast in between": faster(pl.timing.Slowdown(at_s=30, until_s=45, factor=1 / 20, workers=(0,))),
        "one fast at times": faster(pl.timing.Periodic(on_s=15, every_s=60, slowdown=1 / 20, workers=(0,))),
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


def rates(n: int, spectra: Sequence[str], replicas: int) -> Cells:
    """Yield the time under the rule against that of the tuned rate, for each protocol and problem."""
    cluster = clusters(n)["shifted"]

    def measure(problem: Quadratic, plan: str) -> tuple[float, str]:
        _, rate = tuned_time(problem, schedule("bsp", cluster), RATES, seed=1)
        tuned_s, _ = tuned_time(problem, schedule(plan, cluster), RATES, seed=1)
        return ratio_by_rule(plan, cluster, problem, rate, tuned_s, replicas), f"rate {rate:.3g}"

    for plan in ruled(n):
        for problem in noisy(spectra):
            yield Cell(f"{problem.spectrum}, noise {problem.noise}, {plan}", partial(measure, problem, plan))


def protocols(n: int, spectra: Sequence[str], replicas: int) -> Cells:
    """Yield the time of `auto` against that of the best tuned static."""
    return against(statics(n), clusters(n), noisy(spectra), replicas)


def drift(n: int, spectra: Sequence[str], replicas: int) -> Cells:
    """Yield the same for clusters in which the best protocol changes."""
    return against(statics(n), drifts(n), noisy(spectra, [0.1]), replicas)


def healthy(n: int, spectra: Sequence[str], replicas: int) -> Cells:
    """Yield the time of `auto` against that of BSP, on workers that are equally fast."""
    return against(["bsp"], {"uniform": clusters(n)["uniform"]}, noisy(spectra), replicas)


def same_rule(n: int, spectra: Sequence[str], replicas: int) -> Cells:
    """Yield the time of `auto` against that of the best static under the same rule, for noise 0.1."""

    def measure(cluster: pl.Cluster, problem: Quadratic) -> tuple[float, str]:
        bsp_s, rate = tuned_time(problem, schedule("bsp", cluster), RATES, seed=1)
        best, best_s = "bsp", LONGEST * bsp_s
        for plan in statics(n):
            ruled_s = time_by_rule(plan, cluster, problem, rate, best_s, replicas)
            if ruled_s < best_s:
                best, best_s = plan, ruled_s
        return ratio_by_rule("auto", cluster, problem, rate, best_s, replicas), f"best {best}"

    return cells_of(measure, clusters(n), noisy(spectra, [0.1]))


def against(plans: Sequence[str], on: Mapping[str, pl.Cluster], problems: Sequence[Quadratic], replicas: int) -> Cells:
    """Yield the time of `auto` against that of the best of some plans, BSP among them."""

    def measure(cluster: pl.Cluster, problem: Quadratic) -> tuple[float, str]:
        best = "bsp"
        best_s, rate = tuned_time(problem, schedule(best, cluster), RATES, seed=1)
        for plan in plans:
            tuned_s, _ = tuned_time(problem, schedule(plan, cluster), RATES, seed=1, longest_s=best_s)
            if tuned_s < best_s:
                best, best_s = plan, tuned_s
        return ratio_by_rule("auto", cluster, problem, rate, best_s, replicas), f"best {best}"

    return cells_of(measure, on, problems)


def noisy(spectra: Sequence[str], noises: Sequence[float] = NOISES) -> list[Quadratic]:
    """Return the quadratics of some spectra and noise levels."""
    return [Quadratic(spectrum, noise) for spectrum in spectra for noise in noises]


def cells_of(
    measure: Callable[[pl.Cluster, Quadratic], tuple[float, str]],
    on: Mapping[str, pl.Cluster],
    problems: Sequence[Quadratic],
) -> Cells:
    """Yield a cell for each cluster and problem."""
    for name, cluster in on.items():
        for problem in problems:
            yield Cell(f"{name}, {problem.spectrum}, noise {problem.noise}", partial(measure, cluster, problem))


PARTS: Mapping[str, Callable[[int, Sequence[str], int], Cells]] = {
    "rates": rates,
    "protocols": protocols,
    "same_rule": same_rule,
    "drift": drift,
    "healthy": healthy,
}


def measured(cells: Cells, kept: Path | None) -> dict[str, float]:
    """Return the ratio of each cell, measured unless a file has it; add those that are measured to the file."""
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    found = {line["cell"]: line for line in map(json.loads, lines)}
    for cell in cells:
        if cell.name not in found:
            ratio, other = cell.measure()
            found[cell.name] = {"cell": cell.name, "ratio": ratio, "against": other}
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(found[cell.name]) + "\n")
    return {f"{name}, {line['against']}": line["ratio"] for name, line in found.items()}


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
    parser.add_argument("--cells", type=Path, help="folder that keeps the finished cells")
    given = parser.parse_args()
    warnings.simplefilter("ignore", PacelineWarning)
    kept = given.cells and given.cells / f"{given.part}_{given.workers}_{given.rounds}.jsonl"
    found = summary(measured(PARTS[given.part](given.workers, given.spectra, given.rounds), kept))
    report(f"auto_{given.part}_{given.workers}", given, {"workers": given.workers, "replicas": given.rounds, **found})


if __name__ == "__main__":
    main()
