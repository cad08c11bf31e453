"""Seconds per update in simulation against the theory of Dutta et al. 2018: exponential(1) times, P = 8, K = 4.

Source: Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018, Sect. 3.
"""

from __future__ import annotations

import paceline as pl
from common import options, report, rounded, spread

P, K = 8, 4
BAR = 0.01


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--updates", type=int, default=100_000)
    args = parser.parse_args()

    h_p, h_rest = harmonic(P), harmonic(P - K)
    theory = {
        "bsp": h_p,
        f"k_sync(k={K})": h_p - h_rest,
        f"k_async(k={K})": h_p - h_rest,
        f"k_batch_sync(k={K})": K / P,
        f"k_batch_async(k={K})": K / P,
        "asp": 1 / P,
    }
    cluster = pl.Cluster(P, pl.timing.Exponential(mean_s=1.0))
    results = {}
    for protocol, expected_s in theory.items():
        measured = [
            pl.simulate(protocol, cluster, updates=args.updates, seed=seed).seconds_per_update
            for seed in range(args.rounds)
        ]
        worst = max(abs(seconds / expected_s - 1) for seconds in measured)
        results[protocol] = {
            "theory_s": rounded(expected_s),
            "seconds_per_update": spread(measured),
            "worst_relative_error": rounded(worst),
            "meets_bar": worst <= BAR,
        }
    report("runtimes", args, {"bar": f"every seed within {BAR:.0%} of the theory", **results})


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


if __name__ == "__main__":
    main()
