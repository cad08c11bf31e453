"""Seconds per update by theory against simulation: 6 protocols x 4 laws x 4 numbers of workers, several K each.

Each case is one long run. After a warm-up its updates are divided into batches of equal length, and z is the distance
of their mean from the theory in standard errors of that mean. Constant times must be exact. Theory has only bounds for
K-async with times that are neither exponential nor constant, and for K-batch-sync, whose bounds are at most 1 % apart.
There the mean must not exceed the bounds by more than the bar. The same runs give the staleness, whose mean is known
for every law. Each case has its own seed: with common random numbers all z would be nearly equal.

Source: Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018, Sect. 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

import numpy as np

import paceline as pl
from common import options, report, rounded
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Apply, Command, Event
from paceline.engines.virtual.timing import TimedWorkers
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import as_plan

DISTRIBUTIONS: tuple[pl.timing.Distribution, ...] = (
    pl.timing.Exponential(mean_s=1.0),
    pl.timing.ShiftedExponential(shift_s=1.0, mean_s=1.0),
    pl.timing.Pareto(scale_s=1.0, shape=3.0),
    pl.timing.Deterministic(value_s=1.0),
)
INFINITE_VARIANCE = pl.timing.Pareto(scale_s=1.0, shape=2.0)  # finite for the K-th smallest of P > K times
WORKERS = (2, 8, 32, 128)
BATCHES = 40
LEAST_UPDATES = 1_200
WARM_UP = 0.1
MOST_Z, MOST_RMS = 4.5, 1.2
EXACT = 1e-9


def main() -> None:
    parser = options(__doc__ or "", rounds=1)
    parser.add_argument("--gradients", type=int, default=40_000, help=f"gradients, at least {LEAST_UPDATES} updates")
    args = parser.parse_args()

    numbered = enumerate(case for _ in range(args.rounds) for case in cases())
    rows = [measure(*case, args.gradients, seed) for seed, case in numbered]
    z = np.array([row["z"] for row in rows if "z" in row])
    summary: dict[str, Any] = {
        "bar": f"|z| below {MOST_Z}, root mean square below {MOST_RMS}; constant times exact; bounds never violated",
        "cases": len(rows),
        "with z": len(z),
        "largest |z|": rounded(np.abs(z).max()),
        "root mean square of z": rounded(np.sqrt((z**2).mean())),
        "constant times exact": sum(row.get("exact", False) for row in rows),
        "within bounds": sum(row.get("within", False) for row in rows),
        "largest relative error of the mean staleness": rounded(max(row["staleness_error"] for row in rows)),
    }
    missed = [row for row in rows if not row["meets_bar"]]
    summary["meets_bar"] = not missed and summary["root mean square of z"] < MOST_RMS
    report("theory", args, {**summary, "missed": missed, "rows": rows})


def cases() -> Iterator[tuple[pl.plans.Protocol, pl.timing.Distribution, int]]:
    """Yield protocols, laws and workers, without the K at which a protocol equals BSP or ASP."""
    for n in WORKERS:
        least, *middle, most = sorted({1, ceil(n / 4), ceil(n / 2), n})
        for law in DISTRIBUTIONS:
            yield from ((protocol, law, n) for protocol in (pl.bsp(), pl.asp()))
            yield from ((pl.k_sync(k), law, n) for k in (least, *middle))
            yield from ((pl.k_async(k), law, n) for k in middle)
            yield from (
                (make(k), law, n) for make in (pl.k_batch_sync, pl.k_batch_async) for k in (*middle, most, 2 * n)
            )
        yield from ((pl.k_sync(k), INFINITE_VARIANCE, n) for k in (least, *middle))


def measure(
    protocol: pl.plans.Protocol, law: pl.timing.Distribution, n: int, gradients: int, seed: int
) -> dict[str, Any]:
    cluster = pl.Cluster(n, law)
    theory, stale = pl.theory.expected(protocol, cluster), pl.theory.staleness(protocol, cluster)
    updates = max(LEAST_UPDATES, gradients // theory.k)
    at_s, mean_staleness = simulated(protocol, cluster, updates - updates % n, seed)
    row: dict[str, Any] = {
        "protocol": protocol.name,
        "law": str(law),
        "n": n,
        "theory_s": rounded(theory.seconds_per_update),
        "kind": theory.kind,
        "staleness_error": abs(mean_staleness - stale.mean) / max(stale.mean, 1),
    }
    return row | _compared(theory, np.array(at_s), isinstance(law, pl.timing.Deterministic))


def _compared(theory: pl.theory.Expected, at_s: Any, is_constant: bool) -> dict[str, Any]:
    if is_constant:
        measured = at_s[-1] / len(at_s)
        exact = abs(measured / theory.seconds_per_update - 1) <= EXACT
        return {"measured_s": rounded(measured), "exact": bool(exact), "meets_bar": bool(exact)}
    mean, error = batch_means(at_s)
    told: dict[str, Any] = {"measured_s": rounded(mean), "standard_error_s": rounded(error)}
    if theory.kind != "exact":
        within = theory.lower_s - MOST_Z * error <= mean <= theory.upper_s + MOST_Z * error
        bounds = {"lower_s": rounded(theory.lower_s), "upper_s": rounded(theory.upper_s)}
        return {**told, **bounds, "within": bool(within), "meets_bar": bool(within)}
    z = (mean - theory.seconds_per_update) / error
    return {**told, "z": rounded(z), "meets_bar": bool(abs(z) < MOST_Z)}


def simulated(protocol: pl.plans.Protocol, cluster: pl.Cluster, updates: int, seed: int) -> tuple[list[float], float]:
    """Return the time of each update, and the mean staleness of the gradients."""
    at_s: list[float] = []

    def observe(now: float, event: Event | None, commands: Sequence[Command]) -> None:
        at_s.extend(now for command in commands if type(command) is Apply)

    plan = checked_plan(as_plan(protocol), cluster.n, total=None, per_epoch=None)
    engine = TimedWorkers(cluster, seed)
    with engine.loop() as loop:
        loop.run(Coordinator(plan, workers=cluster.n, stop=pl.Stop(updates=updates)), observe)
    return at_s, engine.totals().mean_staleness


def batch_means(at_s: Any) -> tuple[float, float]:
    """Return the mean time between updates after the warm-up, and its standard error from means of batches."""
    length = int(len(at_s) * (1 - WARM_UP)) // BATCHES
    edges = at_s[len(at_s) - 1 - BATCHES * length :: length]
    means = np.diff(edges) / length
    return float(means.mean()), float(means.std(ddof=1) / BATCHES**0.5)


if __name__ == "__main__":
    main()
