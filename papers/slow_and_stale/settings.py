"""Experiments of the paper as data: inputs of Fig. 5 to 7, and training runs of Fig. 8 to 14."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import paceline as pl

RESULTS = Path(__file__).parent / "results"
P = 8  # workers, in all figures but Fig. 5 and 9
K = 4

# In Lemma 3 exp(mu) has the mean 1/mu. Pareto(2, 1) is read as shape 2: with shape 1 it has no mean.
DISTRIBUTIONS: Mapping[str, pl.timing.Distribution] = {
    "exp(1)": pl.timing.Exponential(mean_s=1.0),
    "1 + exp(1)": pl.timing.ShiftedExponential(shift_s=1.0, mean_s=1.0),
    "Pareto(2, 1)": pl.timing.Pareto(scale_s=1.0, shape=2.0),
}


@dataclass(frozen=True)
class Times:
    """Figure of seconds per update in theory and in simulation.

    Args:
        laws: names in DISTRIBUTIONS, one panel or curve each.
        protocols: texts of the protocols by the names of their curves, with {k} for K.
        workers: values of P.
        ks: values of K.
        updates: updates of a simulation; with `in_rounds`, this number of rounds of P gradients.
    """

    says: str
    laws: Sequence[str]
    protocols: Mapping[str, str]
    workers: Sequence[int]
    ks: Sequence[int]
    updates: int
    in_rounds: bool = False
    seeds: int = 3


TIMES: Mapping[str, Times] = {
    "5": Times(
        "log speed-up of asynchronous over synchronous SGD against P",
        list(DISTRIBUTIONS),
        {"sync": "bsp", "async": "asp"},
        workers=(1, 2, 4, 8, 16, 32, 64),
        ks=(1,),
        updates=2000,
        in_rounds=True,
        seeds=6,
    ),
    "6": Times(
        "runtime of 2,000 iterations against K",
        ["Pareto(2, 1)", "1 + exp(1)"],
        {
            "K-sync": "k_sync(k={k})",
            "K-batch-sync": "k_batch_sync(k={k})",
            "K-async": "k_async(k={k})",
            "K-batch-async": "k_batch_async(k={k})",
        },
        workers=(P,),
        ks=range(1, P + 1),
        updates=2000,
    ),
}


@dataclass(frozen=True)
class Bounds:
    """Fig. 7: bounds on the error over time. The paper gives none of these numbers.

    Args:
        constants: constants of the objective; gamma is that of asynchronous SGD.
        eta: learning rate of all protocols.
        seconds: length of the curves.
    """

    says: str
    protocols: Sequence[pl.plans.Protocol]
    cluster: pl.Cluster
    constants: pl.theory.Constants
    eta: float
    seconds: float
    points: int = 201


BOUNDS = Bounds(
    "theoretical error against time of synchronous and asynchronous SGD",
    [pl.bsp(), pl.k_batch_async(k=K), pl.asp()],
    pl.Cluster(P, DISTRIBUTIONS["exp(1)"]),
    pl.theory.Constants(L=1.0, c=0.2, sigma2=1.0, gamma=0.2),
    eta=0.1,
    seconds=800.0,
)


@dataclass(frozen=True)
class Series:
    """Curve: a protocol with its settings.

    Args:
        protocol: text of the protocol, as on the command line.
        lr: learning rate; None for that of the case.
        seconds: virtual seconds of the run; None for those of the case.
        batch_size: the paper's m, samples per minibatch; None for that of the case.
    """

    protocol: str
    lr: float | None = None
    seconds: float | None = None
    batch_size: int | None = None

    @property
    def name(self) -> str:
        """Label that distinguishes the series from the others of its case."""
        others = {"lr": self.lr, "m": self.batch_size}
        return ", ".join([self.protocol, *(f"{name}={value:g}" for name, value in others.items() if value)])


@dataclass(frozen=True)
class Case:
    """Panel: a job, a cluster and its series.

    Args:
        pixels: name of the scale of the pixels in `jobs`.
        batch_size: the paper's m, samples per minibatch.
        regulariser: the paper's lamda.
        seconds: virtual seconds of each run.
        evaluations: evaluations of the probe in that time; longer runs have more.
        sample_s: seconds that each sample of a minibatch adds to a round trip, if the series differ in m.
    """

    data: Literal["mnist", "cifar10"]
    pixels: Literal["0 to 1", "0 to 255", "normalised"]
    cluster: pl.Cluster
    series: Sequence[Series]
    batch_size: int
    lr: float
    regulariser: float
    seconds: float
    evaluations: int
    seeds: int = 3
    sample_s: float = 0.0

    def of(self, series: Series) -> Case:
        """Return the case with the minibatches of a series, and with their time."""
        m = series.batch_size
        if m is None:
            return self
        law = pl.timing.ShiftedExponential(shift_s=m * self.sample_s, mean_s=1.0)
        return replace(self, batch_size=m, cluster=replace(self.cluster, timing=law))


@dataclass(frozen=True)
class Figure:
    """Figure made of training runs, with its panels by name; figures may share runs.

    Args:
        against: quantity on the horizontal axis.
    """

    says: str
    cases: Mapping[str, Case]
    against: Literal["seconds", "updates"] = "seconds"
    shows: Literal["loss", "accuracy"] = "loss"


def protocols(*texts: str) -> list[Series]:
    """Return one series per protocol."""
    return [Series(text) for text in texts]


MNIST = Case(
    "mnist",
    "0 to 1",
    pl.Cluster(P, DISTRIBUTIONS["exp(1)"]),
    [
        Series("bsp", seconds=6000),  # its update takes 22 times as long as one of ASP
        *protocols(*(f"{name}(k={K})" for name in ("k_sync", "k_batch_sync", "k_async", "k_batch_async")), "asp"),
    ],
    batch_size=1,
    lr=0.01,
    regulariser=0.01,
    seconds=1500,
    evaluations=60,
)
ETA_MAX = 0.01
C = 0.005 * ETA_MAX
CIFAR10 = Case(
    "cifar10",
    "0 to 1",
    pl.Cluster(40, pl.timing.Exponential(mean_s=1 / 20)),
    [*protocols("asp", f"asp + staleness_lr(C={C:g})"), Series("asp", lr=ETA_MAX / 2), Series("asp", lr=ETA_MAX / 4)],
    batch_size=250,
    lr=ETA_MAX,
    regulariser=0.05,
    seconds=4,  # 3,200 updates, 16 passes over the data
    evaluations=80,
)
PAPERS_TWO = CIFAR10.series[:2]
K_SYNC = replace(
    MNIST,
    cluster=pl.Cluster(P, pl.timing.ShiftedExponential(shift_s=1.0, mean_s=1.0)),  # m + exp(mu), m = 1; mu is not given
    series=protocols(*(f"k_sync(k={k})" for k in (1, 2, 4, 6, 8))),
    lr=0.05,
    seconds=2500,
    evaluations=50,
)
# m + exp(mu) s, the time law in m; neither the unit of m nor mu is given.
MINIBATCHES = replace(
    K_SYNC,
    cluster=pl.Cluster(4),
    series=[Series("bsp", batch_size=4**i) for i in range(6)],
    seconds=2000,
    sample_s=1 / 64,
)

FIGURES: Mapping[str, Figure] = {
    "8": Figure("error against time of six protocols, MNIST", {"exp(1)": MNIST}),
    "9": Figure(
        "fixed and staleness-dependent learning rate of ASP, CIFAR-10",
        {
            "pixels 0 to 1": CIFAR10,
            "pixels normalised": replace(CIFAR10, pixels="normalised", series=PAPERS_TWO),
            "pixels 0 to 255": replace(
                CIFAR10, pixels="0 to 255", series=[*PAPERS_TWO, Series("bsp", seconds=13)], seconds=2, evaluations=40
            ),
        },
    ),
    "10": Figure(
        "accuracy against time of K-async and K-batch-async, MNIST",
        {"exp(1)": replace(MNIST, series=protocols(f"k_async(k={K})", f"k_batch_async(k={K})"))},
        shows="accuracy",
    ),
    "11": Figure("error against iterations of K-sync, MNIST", {"1 + exp(1)": K_SYNC}, against="updates"),
    "12": Figure("error against time of K-sync, MNIST", {"1 + exp(1)": K_SYNC}),
    "13": Figure("error against iterations by m, MNIST", {"m / 64 + exp(1)": MINIBATCHES}, against="updates"),
    "14": Figure("error against time by m, MNIST", {"m / 64 + exp(1)": MINIBATCHES}),
}
