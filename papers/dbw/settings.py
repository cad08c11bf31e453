"""Experiments of the DBW paper as data: one `Figure` each, with its cases and the series that a case compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import paceline as pl

RESULTS = Path(__file__).parent / "results"
N = 16  # workers, in all figures but Fig. 3


@dataclass(frozen=True)
class Series:
    """One curve, bar or box of a figure.

    Args:
        protocol: text of the protocol, as on the command line.
        lr_rule: "constant" for the dynamic protocols, "proportional" for the paper's static ones.
        lr: learning rate; None for the figure's.
        evaluate_every: updates between two evaluations of the probe.
    """

    protocol: str
    lr_rule: Literal["constant", "proportional"] = "constant"
    lr: float | None = None
    evaluate_every: int = 2

    @property
    def name(self) -> str:
        """Label that distinguishes the series from the others of its case."""
        rule = ", proportional" if self.lr_rule == "proportional" else ""
        return f"{self.protocol}{rule}" if self.lr is None else f"{self.protocol}, lr={self.lr:g}"


@dataclass(frozen=True)
class Case:
    """Panel: a cluster and its series.

    Args:
        seeds: number of seeds of this panel.
        stop: stop rule; None for the figure's.
        batch_size: samples per minibatch; None for the figure's.
    """

    cluster: pl.Cluster
    series: Sequence[Series]
    seeds: int = 3
    stop: pl.Stop | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class Figure:
    """Figure of the paper made of training runs.

    Args:
        lr: learning rate of the dynamic protocols, and of a static one with k = n.
        stop: target on the fixed probe, and a limit on the updates.
    """

    says: str
    job: Literal["mnist", "cifar10"]
    batch_size: int
    lr: float
    stop: pl.Stop
    cases: Mapping[str, Case]


@dataclass(frozen=True)
class Traced:
    """Figure of DBW's estimates, update by update.

    Args:
        clusters: clusters of its cases; the paper does not state its own.
        updates: number of updates of the run.
    """

    says: str
    job: Literal["mnist", "cifar10"]
    batch_size: int
    lr: float
    D: int
    clusters: Sequence[pl.Cluster]
    updates: int
    seeds: int = 3


def cluster(alpha: float) -> pl.Cluster:
    """Return 16 workers with round trips of 1 - alpha + alpha Exp(1) seconds (Sect. 4.1)."""
    if alpha == 0:
        return pl.Cluster(N, pl.timing.Deterministic(1.0))
    return pl.Cluster(N, pl.timing.ShiftedExponential(shift_s=round(1 - alpha, 10), mean_s=alpha))


def dynamic(*protocols: str) -> list[Series]:
    """Return protocols with the figure's learning rate."""
    return [Series(protocol) for protocol in protocols]


def static(*ks: int, base: str = "backup") -> list[Series]:
    """Return static k with DBW's learning rate, a baseline that the paper omits."""
    return dynamic(*(f"{base}(k={k})" for k in ks))


def proportional(*ks: int) -> list[Series]:
    """Return static k with eta(k) = eta k / n, the paper's baseline.

    They make twice as many updates as the dynamic ones, and are evaluated half as often.
    """
    return [Series(f"backup(k={k})", "proportional", evaluate_every=4 if k < N else 2) for k in ks]


DYNAMIC = dynamic("dbw", "dbw(D=20)", "b_dbw")
OPTIONS = dynamic(
    "dbw",
    "dbw(unobserved=upper)",
    "dbw(no_gain=keep)",
    "dbw(late=false)",
    "dbw(window=20)",
    "dbw(forgetting=0.95)",
    "dbw(D=20)",
    "dbw(beta=2)",
)

# Fig. 7 uses the paper's own trace, which was not published. A law with an equally heavy tail replaces it.
SPARK = pl.Cluster(N, pl.timing.LogNormal(median_s=1.0, sigma=0.5))


def half_slower(at_s: float) -> pl.Cluster:
    """Return 16 workers with round trips of 1 s, half of which become five times slower at a time."""
    return pl.Cluster(N, pl.timing.Deterministic(1.0), slowdowns=[pl.timing.Slowdown(at_s=at_s, factor=5, workers=0.5)])


CPU_BOUND = 1500  # limit on the updates of a run that does not reach its target

TRACED: Mapping[str, Traced] = {
    "1": Traced(
        "estimates and truth, MNIST", "mnist", 500, 0.01, 5, [cluster(0.7), cluster(0.2), cluster(0)], updates=60
    ),
    "2": Traced("estimates and truth, CIFAR-10", "cifar10", 256, 0.05, 5, [cluster(1)], updates=200),
}

FIGURES: Mapping[str, Figure] = {
    "4": Figure(
        "k over time and the loss, MNIST",
        *("mnist", 500, 0.08, pl.Stop(eval_loss=0.1, updates=CPU_BOUND)),
        {
            "alpha=0.7": Case(cluster(0.7), [*dynamic("dbw", "b_dbw"), *proportional(10)], seeds=5),
            "alpha=0.7, the first 30 updates": Case(
                cluster(0.7), dynamic("dbw", "dbw(D=20)"), seeds=10, stop=pl.Stop(updates=30)
            ),
        },
    ),
    "5": Figure(
        "k over time, accuracy after 200 s and time to 80 %, CIFAR-10",
        *("cifar10", 256, 0.05, pl.Stop(seconds=400)),
        {
            "alpha=1": Case(
                cluster(1), [*dynamic("dbw", "dbw(D=20)", "b_dbw"), *static(8), *proportional(4, 8, 12, 16)], seeds=20
            )
        },
    ),
    "6": Figure(
        "time to loss 0.2 under three variabilities, MNIST",
        *("mnist", 500, 0.08, pl.Stop(eval_loss=0.2, updates=CPU_BOUND)),
        {
            "alpha=1": Case(cluster(1), [*DYNAMIC, *proportional(8, 10, 12), *static(1, 2, 4, 8)], seeds=5),
            "alpha=0.2": Case(cluster(0.2), [*DYNAMIC, *proportional(12, 14, 15, 16), *static(1, 4, 8, 12)], seeds=5),
            "alpha=0": Case(cluster(0), [*dynamic("dbw", "b_dbw"), *proportional(16)], seeds=5),
        },
    ),
    "8": Figure(
        "how the best static k depends on the batch size, MNIST",
        *("mnist", 500, 0.08, pl.Stop(eval_loss=0.2, updates=CPU_BOUND)),
        {
            "B=16": Case(SPARK, [*DYNAMIC, *static(1, 2, 4, 6, 8, 12, 16)], batch_size=16),
            "B=128": Case(SPARK, [*DYNAMIC, *static(1, 2, 4, 6, 8, 12, 16)], batch_size=128),
            "B=500": Case(SPARK, [*DYNAMIC, *static(1, 2, 4, 8, 16)], batch_size=500),
        },
    ),
    "9": Figure(
        "half of the workers become 5 times slower, MNIST",
        *("mnist", 500, 0.08, pl.Stop(updates=70)),
        {
            "at 24 s": Case(half_slower(24), dynamic("dbw(window=20)", "dbw"), seeds=5),
            "at 160 s": Case(half_slower(160), dynamic("dbw(window=20)", "dbw"), stop=pl.Stop(updates=195)),
        },
    ),
    "10": Figure(
        "DBW and AdaSync, Push & Interrupt, MNIST",
        *("mnist", 500, 0.08, pl.Stop(eval_loss=0.07, updates=CPU_BOUND)),
        {
            f"alpha={alpha:g}": Case(
                cluster(alpha), dynamic("dbw(base=k_sync)", "adasync", "dbw(base=k_sync, pooled=false)")
            )
            for alpha in (0.1, 0.6, 0.3, 1)
        },
    ),
    "options": Figure(
        "what each option of DBW does, as Fig. 6",
        *("mnist", 500, 0.08, pl.Stop(eval_loss=0.2, updates=CPU_BOUND)),
        {f"alpha={alpha:g}": Case(cluster(alpha), OPTIONS) for alpha in (1, 0.2)},
    ),
}
