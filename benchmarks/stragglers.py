"""Straggler detector: its false alarms among identical workers, and its delay for a worker that becomes slow.

Eight workers with steps of 1 + 0.2 N(0, 1) seconds, at least 0.05; each worker delivers one gradient per round.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from common import options, report, spread
from paceline.policies.controllers.straggler_policies import Stragglers

WORKERS, NOISE, WINDOWS, FACTOR, TRIALS = 8, 0.2, 1000, 2.0, 1000
FLAGGED_BAR, FOUND_BAR = 0.01, 0.99
POLICY = Stragglers()


def main() -> None:
    args = options(__doc__ or "").parse_args()
    flagged = spread([share_flagged(np.random.default_rng(seed)) for seed in range(args.rounds)])
    found = spread([share_found(np.random.default_rng(seed)) for seed in range(args.rounds)])
    report(
        "stragglers",
        args,
        {
            "bar": f"under {FLAGGED_BAR:.0%} of worker-windows flagged; found within m + 1 windows in {FOUND_BAR:.0%}",
            "flagged_of_worker_windows": {**flagged, "meets_bar": flagged["max"] < FLAGGED_BAR},
            "found_within_m_plus_1_windows": {**found, "meets_bar": found["min"] >= FOUND_BAR},
        },
    )


def share_flagged(rng: Generator) -> float:
    """Return the share of identical workers that are flagged in 1,000 windows."""
    detector, flagged = POLICY.begin(WORKERS).detector, 0
    for _ in range(WINDOWS):
        for _ in range(POLICY.window):
            for worker, busy_s in enumerate(steps_s(rng)):
                detector.observe(worker, busy_s, WORKERS)
        flagged += len(detector.stragglers)
    return flagged / (WINDOWS * WORKERS)


def share_found(rng: Generator) -> float:
    """Return the share of trials in which a worker is found that becomes slow after 10 to 30 windows."""
    return sum(is_found(rng) for _ in range(TRIALS)) / TRIALS


def is_found(rng: Generator) -> bool:
    detector = POLICY.begin(WORKERS).detector
    before = int(rng.integers(10, 30)) * POLICY.window
    for update in range(before + (POLICY.consecutive + 1) * POLICY.window):
        slowness = FACTOR if update >= before else 1.0
        for worker, busy_s in enumerate(steps_s(rng)):
            detector.observe(worker, busy_s * (slowness if worker == 0 else 1.0), WORKERS)
        if update >= before and 0 in detector.stragglers:
            return True
    return False


def steps_s(rng: Generator) -> NDArray[np.float64]:
    return np.maximum(0.05, 1 + NOISE * rng.standard_normal(WORKERS))


if __name__ == "__main__":
    main()
