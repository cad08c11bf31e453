"""Cases of the comparison: written down before the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline as pl

RESULTS = Path(__file__).parent / "results"
SEEDS = 5
TUNING_SEED = 100  # no seed of the comparison
GRADIENTS, LONG = 3_200, 6_400  # of a run
EVALUATIONS = 20  # of a run
LR = 1e-3  # of AdamW, tuned for `bsp` with 8 workers in papers/auto
RATES = (5e-4, LR, 2e-3)  # tried for `bsp` and for local steps with 4 workers: LR is the best for both
H = 16
NETWORK = pl.timing.Network(
    latency_s=0.025, up_bytes_per_s=12.5e6, down_bytes_per_s=12.5e6
)  # 100 Mbit/s, 25 ms each way
OUTERS = (
    "sgd(lr=1)",
    "sgd(lr=1, momentum=0.3)",
    "nesterov(lr=0.7, momentum=0.3)",
    "nesterov(lr=0.7, momentum=0.6)",
    "nesterov(lr=0.7, momentum=0.9)",
    "nesterov(lr=1, momentum=0.3)",
)


@dataclass(frozen=True)
class Case:
    """Cluster of four workers whose gradients take about 0.25 s.

    Args:
        cluster: simulated cluster.
        series: protocols; OUTER stands for the outer optimizer that the search has found.
        gradients: gradients of each run.
    """

    cluster: pl.Cluster
    series: Sequence[str]
    gradients: int = GRADIENTS


def four(speed: Sequence[float]) -> pl.Cluster:
    """Return four workers with these speeds behind links of 100 Mbit/s."""
    return pl.Cluster(4, pl.timing.Gamma(16, 0.25), speed=speed, network=NETWORK)


DILOCO = f"bsp + local_steps(H={H}, outer=OUTER)"
CASES: Mapping[str, Case] = {
    "equal": Case(four([1.0] * 4), ("bsp", f"bsp + local_steps(H={H})", DILOCO)),
    "equal, twice as long": Case(four([1.0] * 4), ("bsp", DILOCO), LONG),
    "one at half speed": Case(
        four([0.5, 1.0, 1.0, 1.0]),
        (
            DILOCO,
            f"k_sync(k=3) + local_steps(H={H}, outer=OUTER)",
            "bsp + local_steps(seconds=4, outer=OUTER)",
            f"asp + local_steps(H={H}, outer='delayed_nesterov(lr=0.7, momentum=0.6, every=4)')",
        ),
    ),
}
