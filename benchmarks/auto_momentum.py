"""`auto` with momentum: its largest smoothed loss against that of `bsp`, at a rate that may be the largest stable one.

The smoothed loss is the mean of 50 accepted losses in a row. Eight workers, of which two are five times slower, train a
network of two hidden layers on two spirals, with SGD at rate 0.3 and momentum 0.9, or the network of the DBW paper on
MNIST, without momentum and with 0.9. All times are virtual. The spirals without momentum at rate 2, where `bsp` itself
jumps, are no part of the bar.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from common import options, report, spread
from paceline.core.records import GradientArrived
from paceline.errors import PacelineWarning

WINDOW = 50  # gradients
BAR = 1.2
CLUSTER = pl.Cluster(8, pl.timing.Gamma(16, 1.0), speed=[0.2] * 2 + [1.0] * 6)


def spirals(lr: float = 0.3, momentum: float = 0.9) -> pl.Job:
    """Return a job with two classes of 1,000 points on spirals of one turn."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(2000) % 2
    radius = torch.rand(2000, generator=generator).sqrt()
    angle = 2 * math.pi * radius + math.pi * label
    points = 3 * radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return pl.Job(
        model=lambda: nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum),
        data=TensorDataset(points + 0.1 * torch.randn(2000, 2, generator=generator), label),
        batch_size=32,
        name="spirals",
    )


def largest_smoothed_loss(run: pl.results.Result) -> float:
    """Return the largest mean of 50 accepted losses in a row."""
    losses: list[float] = [each.loss for each in run.history.of(GradientArrived) if each.used]
    return max(sum(losses[first : first + WINDOW]) / WINDOW for first in range(len(losses) - WINDOW + 1))


def measured(job: pl.Job, gradients: int, seeds: int) -> dict[str, Any]:
    """Return the largest smoothed losses of some seeds, their ratios, and those of the times of all gradients."""
    largest: dict[str, list[float]] = {"auto": [], "bsp": []}
    times = []
    for seed in range(seeds):
        runs = {
            name: pl.train(
                job, protocol=name, cluster=CLUSTER, stop=f"gradients={gradients}", seed=seed, progress=False
            )
            for name in largest
        }
        for name, run in runs.items():
            largest[name].append(largest_smoothed_loss(run))
        times.append(runs["auto"].time_s / runs["bsp"].time_s)
    ratios = [ours / theirs for ours, theirs in zip(*largest.values(), strict=True)]
    return {
        "loss": spread(ratios),
        "bar": BAR,
        "is_reached": max(ratios) <= BAR,
        "seconds": spread(times),
        "largest": {name: spread(losses) for name, losses in largest.items()},
    }


PARTS: Mapping[str, tuple[Callable[[Path], pl.Job], int]] = {
    "spirals": (lambda folder: spirals(), 800),
    "spirals_without_momentum": (lambda folder: spirals(lr=2.0, momentum=0.0), 800),
    "mnist": (lambda folder: pl.jobs.mnist(lr=0.2, batch_size=64, folder=folder), 400),
    "mnist_with_momentum": (lambda folder: pl.jobs.mnist(lr=0.02, momentum=0.9, batch_size=64, folder=folder), 400),
}


def main() -> None:
    """Measure one part and print it."""
    parser = options(__doc__ or "", rounds=10)
    parser.add_argument("--part", choices=list(PARTS), default="spirals", help="what is measured")
    parser.add_argument("--folder", type=Path, default=Path("data/mnist"), help="folder of MNIST (default data/mnist)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PacelineWarning)
    make_job, gradients = PARTS[args.part]
    results = measured(make_job(args.folder), gradients, args.rounds)
    del args.folder
    report(f"auto_momentum_{args.part}", args, results)


if __name__ == "__main__":
    main()
