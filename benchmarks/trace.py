"""Seconds of real runs against simulations on their traces: the same protocol, up to the same update.

Four worker processes train `digits`; one is always slower than the others, and each is much slower for some periods.
The round trips of the run are extracted and replayed, by draw, in the timing simulation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import paceline as pl
from common import options, ratios, report, rounded, spread
from paceline.protocols.protocol import Protocol

WORKERS = 4
BAR = 0.05
PROTOCOLS: dict[str, Callable[[], Protocol]] = {
    "bsp": pl.bsp,
    "k_sync": lambda: pl.k_sync(k=3),
    "asp": pl.asp,
    "k_batch_async": lambda: pl.k_batch_async(k=3),
}


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--updates", type=int, default=150)
    args = parser.parse_args()

    real_s: dict[str, list[float]] = {name: [] for name in PROTOCOLS}
    simulated_s: dict[str, list[float]] = {name: [] for name in PROTOCOLS}
    censored: dict[str, list[float]] = {name: [] for name in PROTOCOLS}
    for seed in range(args.rounds):
        for name, make in PROTOCOLS.items():
            trace, took_s = record(make(), args.updates, seed)
            real_s[name].append(took_s)
            simulated_s[name].append(replay(trace, make(), args.updates))
            censored[name].append(trace.censored_rows / len(trace.rows))
            print(f"{name}: {simulated_s[name][-1] / took_s:.4f} of {took_s:.2f} s", file=sys.stderr)

    results: dict[str, Any] = {}
    for name in PROTOCOLS:
        ratio = ratios(simulated_s[name], real_s[name])
        off = max(abs(each - 1) for each in ratio["rounds"])
        results[name] = {
            "real_s": spread(real_s[name]),
            "simulated_to_real": {**ratio, "largest_difference": rounded(off), "meets_bar": off <= BAR},
            "censored_share_of_rows": spread(censored[name]),
        }
    report("trace", args, {"bar": f"within {BAR:.0%} in every round", **results})


def record(protocol: Protocol, updates: int, seed: int) -> tuple[pl.timing.Trace, float]:
    """Run real workers, and return their trace with the seconds until the last update."""
    result = pl.train(
        pl.jobs.digits(),
        protocol=protocol,
        cluster=pl.LocalCluster(WORKERS, slowness=stragglers()),
        stop=pl.Stop(updates=updates),
        seed=seed,
    )
    return pl.timing.Trace.of(result), result.history.of(pl.callbacks.UpdateMade)[-1].now_s


def stragglers() -> pl.Cluster:
    """Return a slowness in which worker 0 is always slow and each worker is slow for some short periods."""
    return pl.Cluster(
        WORKERS,
        timing=pl.timing.ShiftedExponential(shift_s=0.01, mean_s=0.01),
        slowdowns=[pl.timing.Slowdown(at_s=0, factor=2, workers=(0,))],
        transient=pl.timing.Transient(mean_on_s=0.5, mean_off_s=2.0, slowdown=4),
    )


def replay(trace: pl.timing.Trace, protocol: Protocol, updates: int) -> float:
    """Return the virtual seconds until the last update."""
    return pl.simulate(protocol, pl.Cluster(WORKERS, timing=trace), updates=updates).time_s


if __name__ == "__main__":
    main()
