"""Cases of the comparison: a job on a cluster, and the protocols whose rate is tuned there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import paceline as pl

RESULTS = Path(__file__).parent / "results"
SEEDS = 5
LONGEST = 1.5  # times of the best time so far, after which a run of the search ends
FINAL_GRADIENTS = {"mnist, B=64": 1_440, "gpt, one slow": 800}  # after which the losses on unseen data are compared
LONGEST_RULED = 3.0  # times of BSP's time, after which a run under the rule ends


@dataclass(frozen=True)
class Case:
    """Job on a cluster, with a target.

    Args:
        job: name of the job.
        batch_size: samples per minibatch.
        cluster: simulated cluster.
        target: loss to reach, of the training set (digits), a fixed probe of it (MNIST) or the validation text (GPT).
        lr: rate of BSP at which its search begins.
        protocols: protocols with their own tuned rate, and under the rule "noise".
        evaluate_every: gradients between two evaluations.
        most_gradients: limit on the gradients of a run.
        seeds: number of paired seeds.
        tuning_seeds: number of those that the search for a rate uses.
        searches: whether rates are searched; else every protocol has the rate `lr`.
        microbatches: microbatches of a minibatch; two or more measure the variance of a gradient.
    """

    job: Literal["digits", "mnist", "gpt"]
    batch_size: int
    cluster: pl.Cluster
    target: float
    lr: float
    protocols: Sequence[str]
    evaluate_every: int
    most_gradients: int
    seeds: int = SEEDS
    tuning_seeds: int = 2
    searches: bool = True
    microbatches: int = 1


def six(n: int) -> tuple[str, ...]:
    """Return the six protocols that are compared with BSP."""
    half, quarter = n // 2, n // 4
    return (f"k_sync(k={half})", f"k_sync(k={quarter})", "pull(k=1)", f"k_async(k={quarter})", "asp", "ssp(lead=4)")


def exponential(n: int, alpha: float) -> pl.Cluster:
    """Return n workers with round trips of 1 - alpha + alpha Exp(1) seconds, as in the DBW paper (Sect. 4.1)."""
    return pl.Cluster(n, pl.timing.ShiftedExponential(shift_s=round(1 - alpha, 10), mean_s=alpha))


def usual(**slow: object) -> pl.Cluster:
    """Return 8 workers with round trips of about a second, some of them slow."""
    return pl.Cluster(8, pl.timing.Gamma(16, 1.0), **slow)  # type: ignore[arg-type]  # values of different types


def gpt(cluster: pl.Cluster, protocols: Sequence[str]) -> Case:
    """Return a case of the character-level GPT."""
    return Case("gpt", 8, cluster, 2.3, 2e-3, protocols, 40, 6_000, tuning_seeds=1)


CASES: Mapping[str, Case] = {
    "digits, B=16": Case("digits", 16, exponential(16, 0.7), 0.2, 2.0, six(16), 16, 5_000),
    "digits, B=500": Case("digits", 500, exponential(16, 0.7), 0.2, 2.0, six(16), 16, 5_000),
    "mnist, B=64": Case("mnist", 64, exponential(16, 0.7), 0.2, 0.16, six(16), 32, 4_000),
    # At the tuned rate of bsp in the case before, which is also that of pull(k=1).
    "mnist, B=64, two microbatches": Case(
        "mnist", 64, exponential(16, 0.7), 0.2, 0.16 * 2**0.5, ("pull(k=1)",), 32, 4_000, searches=False, microbatches=2
    ),
    "mnist, B=500": Case("mnist", 500, exponential(8, 0.7), 0.2, 0.32, six(8), 8, 4_000, tuning_seeds=1),
    "mnist, B=500, alpha=1": Case(
        "mnist", 500, exponential(16, 1.0), 0.2, 0.08, ("pull(k=1)",), 4, 6_000, searches=False
    ),
    "mnist, B=500, alpha=0.2": Case(
        "mnist", 500, exponential(16, 0.2), 0.2, 0.08, ("pull(k=1)",), 4, 6_000, searches=False
    ),
    "gpt, one slow": gpt(usual(speed=[0.25] + [1.0] * 7), ("k_sync(k=7)", *six(8))),
    "gpt, transient": gpt(
        usual(transient=pl.timing.Transient(slowdown=10.0, mean_on_s=20.0, mean_off_s=180.0)), ("k_sync(k=6)", "asp")
    ),
    "gpt, ladder": gpt(usual(speed=[1 / 8 + i / 8 for i in range(8)]), ("k_sync(k=4)", "k_async(k=4)", "asp")),
}
