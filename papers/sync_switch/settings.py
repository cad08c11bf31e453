"""Experiments of the paper as data: its three set-ups, a small version of them, and the series of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import paceline as pl

RESULTS = Path(__file__).parent / "results"
MOMENTUM = 0.9
DECAY_AT = (0.5, 0.75)  # shares of the workload at which the learning rate falls to a tenth


@dataclass(frozen=True)
class Measured:
    """Seconds per step on the authors' cluster: mean, and standard deviation of the mean over 100 steps.

    Source: logs published by the authors (github.com/cake-lab/Sync-Switch).
    """

    bsp_s: float
    bsp_std_s: float
    asp_s: float
    asp_std_s: float


@dataclass(frozen=True)
class Setup:
    """Training set-up: job and cluster.

    Args:
        job: name of the job in `jobs`.
        lr: learning rate per gradient; under BSP it is n times as large.
        batch_size: samples per worker.
        workload: gradients of the whole run.
        evaluations: number of evaluations on the test data in the whole run.
        fixed: share of a round trip that does not grow with the batch size.
        measured: seconds of a step that the authors measured.
    """

    job: Literal["mnist", "cifar10-resnet32", "cifar100-resnet50"]
    cluster: pl.Cluster
    lr: float
    batch_size: int
    workload: int
    evaluations: int = 32
    fixed: float = 0.5
    measured: Measured | None = None

    def cluster_for(self, batch_size: int) -> pl.Cluster:
        """Return the cluster with its speed for minibatches of this size."""
        if batch_size == self.batch_size:
            return self.cluster
        return replace(self.cluster, speed=1 / (self.fixed + (1 - self.fixed) * batch_size / self.batch_size))


@dataclass(frozen=True)
class Series:
    """Bar or curve: a protocol with its settings.

    Args:
        protocol: text of the protocol, as on the command line.
        lr: learning rate per gradient; None for the set-up's.
        batch_size: samples per worker; None for the set-up's. The samples of the whole run stay the same.
    """

    protocol: str
    lr: float | None = None
    batch_size: int | None = None

    @property
    def name(self) -> str:
        """Label that distinguishes the series from the others of its case."""
        others = {"lr": self.lr, "B": self.batch_size}
        return ", ".join([self.protocol, *(f"{name}={value:g}" for name, value in others.items() if value)])


@dataclass(frozen=True)
class Case:
    """Panel: a set-up with its stragglers and its series.

    Args:
        reference: series with which accuracy, time and time to accuracy are compared.
    """

    setup: Setup
    series: Sequence[Series]
    seeds: int = 3
    reference: str = "bsp"


@dataclass(frozen=True)
class Figure:
    """Figure of the paper, or an additional experiment, with its panels by name."""

    says: str
    cases: Mapping[str, Case]


def protocols(*texts: str) -> list[Series]:
    """Return one series per protocol."""
    return [Series(text) for text in texts]


def switch(percent: float, bsp: str = "bsp", asp: str = "asp") -> str:
    """Return the plan with this percentage of BSP.

    >>> switch(6.25)
    'bsp@6.25% >> asp'
    """
    return f"{bsp}@{percent:g}% >> {asp}"


def measured_cluster(n: int, measured: Measured) -> pl.Cluster:
    """Return workers whose round trips under ASP have the mean and the variance of those on the authors' cluster.

    n workers make a step every ``asp_s``, so a round trip takes ``n asp_s``. The number of steps in a time t of a
    renewal process has the variance ``c^2 t / asp_s``, with c the coefficient of variation of a round trip, so the
    mean of 100 steps has the relative standard deviation ``c / 10``.
    """
    variation = 10 * measured.asp_std_s / measured.asp_s
    return pl.Cluster(n, pl.timing.Gamma(shape=round(variation**-2, 3), mean_s=round(n * measured.asp_s, 4)))


def slowed(setup: Setup, *slowdowns: pl.timing.Slowdown | pl.timing.Periodic) -> Setup:
    """Return the same set-up with stragglers."""
    return replace(setup, cluster=replace(setup.cluster, slowdowns=slowdowns))


# -- the small version ---------------------------------------------------------------------------------------------

SMALL = Setup(
    "mnist",
    pl.Cluster(8, pl.timing.ShiftedExponential(shift_s=0.5, mean_s=0.5)),
    lr=0.00625,
    batch_size=32,
    workload=8000,
)
LARGEST_LR = 0.025  # at 16 workers: result of the figure "rates"
SMALL_16 = replace(SMALL, cluster=replace(SMALL.cluster, n=16), lr=LARGEST_LR)
ONE = (pl.timing.Periodic(on_s=20, every_s=100, slowdown=5, workers=(0,)),)
# Both are slow together for a quarter of the time, as two independent workers are on average.
TWO = (
    pl.timing.Periodic(on_s=50, every_s=100, slowdown=5, workers=(0,)),
    pl.timing.Periodic(on_s=50, every_s=100, slowdown=5, workers=(1,), at_s=25),
)
MILD = (pl.timing.Slowdown(at_s=100, until_s=200, factor=2, workers=(0,)),)
PERCENT = 25
PLAN = switch(PERCENT)
AWARE = [switch(PERCENT, "bsp + greedy"), switch(PERCENT, "bsp + elastic")]
RATES = (0.00625, 0.0125, 0.025, 0.035, 0.05, 0.1)  # doublings, and one rate between the last that trains and the next

# -- the paper's set-ups -------------------------------------------------------------------------------------------

MEASURED = {
    "1": Measured(bsp_s=1.333, bsp_std_s=0.072, asp_s=0.0249, asp_std_s=0.0009),
    "2": Measured(bsp_s=0.705, bsp_std_s=0.064, asp_s=0.0473, asp_std_s=0.0009),
    "3": Measured(bsp_s=2.41, bsp_std_s=0.11, asp_s=0.0123, asp_std_s=0.0002),
}
SETUP_1 = Setup(
    "cifar10-resnet32",
    measured_cluster(8, MEASURED["1"]),
    lr=0.1,
    batch_size=128,
    workload=64_000,
    fixed=0.083 / (0.083 + 1.16e-3 * 8 * 128),  # seconds of a BSP step, and additional seconds per image
    measured=MEASURED["1"],
)
SETUP_2 = replace(SETUP_1, job="cifar100-resnet50", cluster=measured_cluster(8, MEASURED["2"]), measured=MEASURED["2"])
SETUP_3 = replace(SETUP_1, cluster=measured_cluster(16, MEASURED["3"]), measured=MEASURED["3"])
SETUPS = {"set-up 1": (SETUP_1, 6.25), "set-up 2": (SETUP_2, 12.5), "set-up 3": (SETUP_3, 50.0)}

# Their stragglers are 10 or 30 ms of network latency. The factors are the slowdowns of BSP with such workers
# all the time (1.06 and 2.75), and the times are proportional to the phase of BSP, 666 s there and about 155 s here.
MILD_1 = (pl.timing.Slowdown(at_s=40, until_s=63, factor=1.06, workers=(0,)),)
MODERATE_1 = tuple(
    pl.timing.Periodic(on_s=23, every_s=39, slowdown=2.75, workers=(worker,), at_s=at_s)
    for worker, at_s in ((0, 0), (1, 12))
)

ORDERS = protocols("bsp", "asp", switch(50), "asp@50% >> bsp")
SHARES = protocols("asp", *(switch(percent) for percent in (3.125, 6.25, 12.5, 25, 50)), "bsp")
MOMENTUM_RULES = ("zero", "1/n", "i/n", "2^i/n")


def momentum(percent: float) -> list[Series]:
    """Return the plan with each rule for the momentum after the switch; without a rule it is kept."""
    ruled = (switch(percent, asp=f'asp + momentum(rule="{rule}")') for rule in MOMENTUM_RULES)
    return protocols(switch(percent), *ruled)


def batches(setup: Setup, percent: float) -> list[Series]:
    """Return the plan with smaller and larger minibatches."""
    sizes = (setup.batch_size // 2, None, setup.batch_size * 2, setup.batch_size * 4)
    return [Series(switch(percent), batch_size=size) for size in sizes]


def end_to_end(percent: float) -> list[Series]:
    """Return the series of Fig. 10."""
    return protocols("bsp", "asp", switch(percent))


FIGURES: Mapping[str, Figure] = {
    "5": Figure(
        "order and share of synchronicity",
        {
            "small, order": Case(SMALL, ORDERS, seeds=5),
            "small, share": Case(SMALL, SHARES, seeds=5),
            "set-up 1, order": Case(SETUP_1, ORDERS, seeds=5),
            "set-up 1, share": Case(SETUP_1, SHARES, seeds=5),
        },
    ),
    "8": Figure(
        "batch size, and momentum after the switch",
        {
            "small, batch size": Case(SMALL, batches(SMALL, PERCENT), reference=PLAN),
            "small, momentum": Case(SMALL, momentum(PERCENT), reference=PLAN),
            "set-up 1, batch size": Case(SETUP_1, batches(SETUP_1, 6.25), reference=switch(6.25)),
            "set-up 1, momentum": Case(SETUP_1, momentum(6.25), reference=switch(6.25)),
        },
    ),
    "10": Figure(
        "end to end",
        {
            "small, n=8": Case(SMALL, end_to_end(PERCENT), seeds=5),
            "small, n=16": Case(SMALL_16, end_to_end(50), seeds=5),
            **{name: Case(setup, end_to_end(percent), seeds=5) for name, (setup, percent) in SETUPS.items()},
        },
    ),
    "11": Figure(
        "loss and accuracy, and time to the accuracy of BSP",
        {"small": Case(SMALL, SHARES, seeds=5), "set-up 1": Case(SETUP_1, SHARES, seeds=5)},
    ),
    "15": Figure(
        "transient stragglers: without a policy, greedy, elastic",
        {
            "small, mild": Case(slowed(SMALL, *MILD), protocols(PLAN, *AWARE), reference=PLAN),
            "small, moderate": Case(slowed(SMALL, *TWO), protocols(PLAN, *AWARE), seeds=5, reference=PLAN),
            "small, none": Case(SMALL, protocols(PLAN, *AWARE), seeds=5, reference=PLAN),
            **{
                f"set-up 1, {name}": Case(
                    slowed(SETUP_1, *slowdowns),
                    protocols(switch(6.25), switch(6.25, "bsp + greedy"), switch(6.25, "bsp + elastic")),
                    seeds=5,
                    reference=switch(6.25),
                )
                for name, slowdowns in (("mild", MILD_1), ("moderate", MODERATE_1))
            },
        },
    ),
    "straggler": Figure(
        "one transient straggler, 8 workers",
        {"small": Case(slowed(SMALL, *ONE), end_to_end(PERCENT), seeds=5)},
    ),
    "rates": Figure(
        "the largest rate at which BSP trains, 16 workers",
        {"small": Case(SMALL_16, [Series("bsp", lr=lr) for lr in RATES], reference="bsp, lr=0.00625")},
    ),
    "sixteen": Figure(
        "at that rate, 16 workers",
        {"small": Case(SMALL_16, protocols("bsp", "asp", *(switch(percent) for percent in (25, 50, 75))), seeds=5)},
    ),
}
