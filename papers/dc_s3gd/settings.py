"""Experiments of the paper as data: inputs of its times, small training runs, and its own Table I."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

import paceline as pl
from paceline.clusters.timing.distributions import Empirical

RESULTS = Path(__file__).parent / "results"
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
DECAY_FACTOR = 2.3  # k of Sect. IV-A, factor on the weight decay
LR_BATCH = 256  # samples to which a learning rate refers
BLOCKING, OVERLAPPING, COMPENSATED = "all_reduce", "s3gd", "dc_s3gd"

JobName = Literal["mnist", "cifar10", "cifar10-resnet20", "cifar10-resnet50", "cifar10-vgg16"]
OptimizerName = Literal["sgd", "lars", "lamb"]
SAMPLES: Mapping[JobName, int] = {
    "mnist": 60_000,
    **dict.fromkeys(("cifar10", "cifar10-resnet20", "cifar10-resnet50", "cifar10-vgg16"), 50_000),
}


# -- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """Training set-up: job, batch size and length.

    Args:
        job: name of the job in `jobs`.
        n: number of workers, >= 1.
        batch_size: samples of all workers together.
        lr: eta_sn, learning rate of a single worker for minibatches of 256; eta = N eta_sn grows with the whole batch.
        epochs: epochs of the whole run.
        warm_up_until: share of the workload after which the warm-up ends; it would reach eta at half of it.
        evaluations: number of evaluations on the test data in the whole run.
        optimizer: local optimizer: SGD as in the paper, or one of its outlook (Sect. V).
    """

    job: JobName
    n: int
    batch_size: int
    lr: float
    epochs: int
    warm_up_until: float = 1 / 6
    evaluations: int = 12
    optimizer: OptimizerName = "sgd"

    @property
    def minibatch(self) -> int:
        """Samples per worker."""
        size, rest = divmod(self.batch_size, self.n)
        assert not rest, f"{self.batch_size} samples are no {self.n} minibatches"
        return size

    @property
    def updates(self) -> int:
        """Number of updates nearest to the epochs."""
        return round(self.epochs * SAMPLES[self.job] / self.batch_size)

    @property
    def schedule(self) -> pl.plans.LinearSchedule:
        """The paper's schedule of learning rate and weight decay."""
        return pl.plans.LinearSchedule(
            warm_up="50%", warm_up_until=pl.plans.Duration("fraction", self.warm_up_until), weight_decay=DECAY_FACTOR
        )


@dataclass(frozen=True)
class Series:
    """Column or curve: a protocol, as typed on the command line."""

    name: str


ALL = tuple(Series(protocol) for protocol in (BLOCKING, OVERLAPPING, COMPENSATED))


@dataclass(frozen=True)
class Case:
    """Panel: a set-up and its series."""

    setup: Setup
    series: Sequence[Series] = ALL
    seeds: int = 3


@dataclass(frozen=True)
class Figure:
    """Figure or table with its panels by name; the name of a panel begins with its job."""

    says: str
    cases: Mapping[str, Case]


# Chosen on seed 100, see the README.
MNIST = Setup("mnist", n=16, batch_size=4096, lr=0.05, epochs=6)
CIFAR10 = Setup("cifar10", n=16, batch_size=4096, lr=0.025, epochs=6)
RESNETS = {
    name: Setup(name, n=16, batch_size=4096, lr=0.1, epochs=90)
    for name in ("cifar10-resnet20", "cifar10-resnet50", "cifar10-vgg16")
}
LARGE = replace(MNIST, epochs=10)
HIGH_LR = 0.1
RATES = (0.025, 0.05, 0.1, 0.2)
LAMBDAS = (0.05, 0.5, 1.0)  # in addition to 0.2
LAGS = (2, 4)  # gradients during a sum, in addition to 1
RATES_OF: Mapping[OptimizerName, Sequence[float]] = {"lars": (2.5, 5.0, 10.0, 20.0), "lamb": (2e-3, 4e-3, 8e-3, 1.6e-2)}


def grid(setup: Setup, workers: Sequence[int], batch_sizes: Sequence[int]) -> dict[str, Case]:
    """Return a case for each number of workers and batch size with at least 64 samples per worker."""
    return {
        f"{setup.job}, |B|={size}, N={n}": Case(replace(setup, n=n, batch_size=size))
        for size, n in product(batch_sizes, workers)
        if size // n >= 64
    }


FIGURES: Mapping[str, Figure] = {
    "large-batch": Figure(
        "16 workers with 256 samples each, with and without compensation",
        {
            "mnist": Case(LARGE, seeds=5),
            "mnist, twice the rate": Case(replace(LARGE, lr=HIGH_LR)),
        },
    ),
    "table1": Figure(
        "accuracy against batch size",
        {
            **grid(MNIST, (4, 16, 64), (1024, 4096, 8192)),
            **grid(CIFAR10, (4, 16, 64), (1024, 4096)),
            **{
                panel: case
                for setup in RESNETS.values()
                for panel, case in grid(setup, (4, 16, 64), (1024, 4096)).items()
            },
        },
    ),
    "rates": Figure(
        "accuracy against the learning rate, 16 workers",
        {f"mnist, lr={lr:g}": Case(replace(MNIST, lr=lr)) for lr in RATES},
    ),
    "lambda": Figure(
        "how much to compensate at a high rate, 16 workers",
        {
            f"mnist, lr={HIGH_LR:g}": Case(
                replace(MNIST, lr=HIGH_LR),
                [*ALL, *(Series(f"{COMPENSATED}(lambda0={each:g})") for each in LAMBDAS)],
            )
        },
    ),
    "lag": Figure(
        "more gradients during a sum, 16 workers",
        {
            "mnist": Case(
                LARGE, [*ALL, *(Series(f"{each}(lag={lag})") for lag in LAGS for each in (OVERLAPPING, COMPENSATED))]
            )
        },
    ),
    "optimizers": Figure(
        "LARS and LAMB as local optimizers, 16 workers",
        {
            f"mnist, {name}, lr={lr:g}": Case(replace(LARGE, optimizer=name, lr=lr))
            for name, rates in RATES_OF.items()
            for lr in rates
        },
    ),
}

# -- times -----------------------------------------------------------------------------------------------------------

COMPUTE_S = 1.0


@dataclass(frozen=True)
class Iterations:
    """Eq. (13) to (15): seconds of an iteration as a function of those of the all-reduce.

    Args:
        workers: values of N.
        all_reduce_s: seconds of an all-reduce, in units of the seconds of a gradient.
        protocols: protocols; with a server, each worker pushes and pulls through its own link.
        rounds: rounds of a simulation, of N gradients each.
        payload_bytes: size of ResNet-50's gradient; only its ratio to the network's speed matters.
    """

    workers: Sequence[int] = (4, 16, 64)
    all_reduce_s: Sequence[float] = (0.1, 0.2, 0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
    protocols: Sequence[str] = (BLOCKING, COMPENSATED, "local_sgd(H=4)", "bsp", "asp")
    rounds: int = 400
    payload_bytes: float = 25_557_032 * 4


ITERATIONS = Iterations()


@dataclass(frozen=True)
class Stragglers:
    """Seconds per N gradients with variable compute times and communication that takes no time.

    Args:
        clusters: clusters by the law of their compute times; each is used with all N.
        workers: values of N.
        protocols: protocols, with {most} for three quarters of N.
        rounds: rounds of a simulation, of N gradients each.
    """

    clusters: Mapping[str, pl.Cluster]
    workers: Sequence[int]
    protocols: Sequence[str]
    rounds: int = 400
    seeds: int = 3


ALWAYS_1 = pl.timing.Deterministic(1.0)
HICCUPS = Empirical((1.0,) * 49 + (5.0,))
ALWAYS_SLOW = pl.timing.Slowdown(at_s=0, factor=2, workers=(0,))
NOW_AND_THEN = pl.timing.Periodic(on_s=20, every_s=100, slowdown=5, workers=(0,))

STRAGGLERS = Stragglers(
    {
        "exp(1)": pl.Cluster(1, pl.timing.Exponential(1.0)),
        "0.5 + 0.5 exp(1)": pl.Cluster(1, pl.timing.ShiftedExponential(shift_s=0.5, mean_s=0.5)),
        "0.9 + 0.1 exp(1)": pl.Cluster(1, pl.timing.ShiftedExponential(shift_s=0.9, mean_s=0.1)),
        "1, and 5 for every 50th gradient": pl.Cluster(1, HICCUPS),
        "1, one worker 5 times slower for 20 s in every 100 s": pl.Cluster(1, ALWAYS_1, slowdowns=(NOW_AND_THEN,)),
        "1, one worker twice as slow": pl.Cluster(1, ALWAYS_1, slowdowns=(ALWAYS_SLOW,)),
    },
    (4, 16, 64),
    (BLOCKING, COMPENSATED, "k_sync(k={most})", "ssp(lead=1)", "asp"),
)

# -- the paper's own -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Theirs:
    """Row of Table I.

    Args:
        batch_size: samples of all nodes together.
        accuracy: accuracy on the validation data, in percent.
        images_per_s: images per second of all nodes together.
        lr: eta_sn, learning rate for 256 samples.
        warm_up_epochs: warm-up of the 90 epochs; extended to 20 on 64 and 128 nodes.
    """

    model: Literal["resnet50", "resnet101", "resnet152", "vgg16"]
    batch_size: int
    nodes: int
    accuracy: float
    images_per_s: int

    @property
    def lr(self) -> float:
        return 0.02 if self.model == "vgg16" else 0.1

    @property
    def warm_up_epochs(self) -> int:
        return 20 if self.nodes >= 64 else 15

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration in the paper."""
        return self.batch_size / self.images_per_s


EPOCHS = 90
K = 1024
TABLE_I = (
    Theirs("resnet50", 16 * K, 32, 77.5, 2078),
    Theirs("resnet50", 32 * K, 32, 77.4, 2144),
    Theirs("resnet50", 32 * K, 64, 77.2, 3815),
    Theirs("resnet50", 64 * K, 64, 75.6, 4245),
    Theirs("resnet50", 64 * K, 128, 75.1, 7340),
    Theirs("resnet50", 128 * K, 128, 69.7, 8201),
    Theirs("resnet101", 64 * K, 64, 77.2, 2578),
    Theirs("resnet152", 32 * K, 64, 78.7, 1768),
    Theirs("vgg16", 16 * K, 64, 69.2, 1206),
)
