"""`patient` against the best constant K of `k_sync` in hindsight: gain per second on simulated clusters.

    python benchmarks/patient.py

The gain of an update of k gradients is k / (k + phi), with a known phi. The gain per second is the sum over all updates
of a run, from its first update on, over the seconds of the run. Both sides have the same random times: those of a
gradient depend on the seed, the worker and the number of its work only. The best K is chosen for each seed and phi from
the results.

The clusters are in three groups. "independent": each time is drawn anew. "constant": some workers are always slower, so
that a constant K can leave them out. "correlated": workers are slow for some time, alone or together. There the times
of a fast worker have a deviation of 1 % (steady) or of 25 %; with 25 %, many values of K are nearly as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from time import perf_counter
from typing import Any

import paceline as pl
from common import options, report, rounded, spread
from paceline.coordinator.coordinator import Coordinator
from paceline.core import events
from paceline.core.stop import Stop
from paceline.engines.virtual.timing import TimedWorkers
from paceline.policies.estimators.arrivals.update_closing import gain
from paceline.protocols.protocol import Phase, Plan

PHIS = (1.0, 10.0, 50.0)
BARS = {"independent": 0.95, "constant": 0.95, "correlated": 1.05}
STEADY, VARIED = pl.timing.Uniform(0.98, 1.02), pl.timing.Gamma(16, 1.0)


def clusters(n: int) -> dict[str, dict[str, pl.Cluster]]:
    """Return clusters by group, with a mean round trip of about a second."""
    alone = pl.timing.Transient(slowdown=10.0, mean_on_s=20.0, mean_off_s=180.0)
    together = [pl.timing.Periodic(on_s=60.0, every_s=180.0, slowdown=5.0, workers=0.5, at_s=60.0)]
    third = [1 / 3] * (n // 2) + [1.0] * (n - n // 2)
    return {
        "independent": {
            "uniform": pl.Cluster(n, STEADY),
            "shifted": pl.Cluster(n, pl.timing.ShiftedExponential(0.3, 0.7)),
            "exponential": pl.Cluster(n, pl.timing.Exponential(1.0)),
            "pareto": pl.Cluster(n, pl.timing.Pareto(0.2, 1.2)),
        },
        "constant": {
            "half slow, steady": pl.Cluster(n, STEADY, speed=third),
            "half slow": pl.Cluster(n, VARIED, speed=third),
        },
        "correlated": {
            "transient, steady": pl.Cluster(n, STEADY, transient=alone),
            "transient": pl.Cluster(n, VARIED, transient=alone),
            "half slow together, steady": pl.Cluster(n, STEADY, slowdowns=together),
            "half slow together": pl.Cluster(n, VARIED, slowdowns=together),
        },
    }


def updates(phase: Phase, cluster: pl.Cluster, seconds: float, seed: int) -> tuple[list[int], float]:
    """Return the number of gradients of each update of a run, and the time of the last one."""
    sizes: list[int] = []
    engine = TimedWorkers(cluster, seed)
    ended_s = 0.0

    def observe(now: float, event: events.Event | None, commands: Sequence[events.Command]) -> None:
        nonlocal ended_s
        for command in commands:
            if isinstance(command, events.Apply):
                sizes.append(len(command.gradients))
                ended_s = engine.now

    with engine.loop() as loop:
        loop.run(Coordinator(Plan((phase,)), workers=cluster.n, stop=Stop(seconds=seconds)), observe)
    return sizes, ended_s


def patient(phi: float) -> Phase:
    """Return `patient` with a known phi."""
    base = pl.patient()
    return Phase(base.protocol, controllers=(pl.controllers.Patient(phi=phi),))


def compare(cluster: pl.Cluster, seconds: float, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the ratio of the gain per second to that of the best constant K by phi, with the best K and mean K."""
    constant: dict[tuple[int, int], float] = {}  # updates per second
    for seed in seeds:
        for k in range(1, cluster.n + 1):
            sizes, ended_s = updates(Phase(pl.k_sync(k)), cluster, seconds, seed)
            constant[seed, k] = len(sizes) / ended_s
    found = {}
    for phi in PHIS:
        ratios, best, means = [], [], []
        for seed in seeds:
            sizes, ended_s = updates(patient(phi), cluster, seconds, seed)
            rates = {k: constant[seed, k] * gain(k, phi) for k in range(1, cluster.n + 1)}
            largest = max(rates.values())
            best.append(next(k for k, rate in rates.items() if rate == largest))
            ratios.append(sum(gain(k, phi) for k in sizes) / ended_s / largest)
            means.append(fmean(sizes))
        found[f"phi {phi:g}"] = {**spread(ratios), "best_k": best, "mean_k": [rounded(mean) for mean in means]}
    return found


def decision_us(n: int) -> dict[str, float]:
    """Return the microseconds of a decision at an arrival, a timer and the opening of an update."""
    spent = {"arrival": [0.0, 0.0], "timer": [0.0, 0.0], "open": [0.0, 0.0]}

    class Timed(pl.controllers.Patient):
        def decide(self, state: Any, observation: pl.controllers.Observation) -> Any:
            begun = perf_counter()
            answer = super().decide(state, observation)
            kind = spent[observation.trigger]
            kind[0], kind[1] = kind[0] + perf_counter() - begun, kind[1] + 1
            return answer

    cluster = pl.Cluster(n, pl.timing.ShiftedExponential(0.3, 0.7))
    updates(Phase(pl.patient().protocol, controllers=(Timed(phi=10.0),)), cluster, 100.0, 0)
    return {kind: rounded(1e6 * seconds / max(calls, 1)) for kind, (seconds, calls) in spent.items()}


def main() -> None:
    """Measure all clusters and print the ratios."""
    parser = options(__doc__ or "", rounds=5)
    parser.add_argument("--workers", type=int, default=16, help="number of workers (default 16)")
    parser.add_argument("--seconds", type=float, default=600.0, help="simulated seconds of a run (default 600)")
    given = parser.parse_args()
    seeds = range(1, given.rounds + 1)
    found = {
        group: {name: compare(cluster, given.seconds, seeds) for name, cluster in members.items()}
        for group, members in clusters(given.workers).items()
    }
    report("patient", given, {"bars": BARS, "ratios": found, "decision_us": decision_us(given.workers)})


if __name__ == "__main__":
    main()
