"""Cost of a data set whose minibatch takes as long as its gradient, prepared in line and in background processes.

The same run is made with samples that take no time and with samples that take time. A minibatch takes as long as a
gradient, which is measured first. It takes this time once by waiting, as with a data set on a disk or in a network, and
once by computing, as with decoding and augmentation, for which the background processes need their own cores. Both runs
follow a warm-up run. The time to start the processes is reported separately, since a run starts them once.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline as pl
from common import options, ratios, report, rounded, spread

BAR = 1.1
WIDTH = 512
SAMPLES = 2048


class Costly(Dataset[tuple[Tensor, int]]):
    """Random images with an artificial loading time.

    Args:
        batch_s: seconds per minibatch.
        kind: how the time passes, "waits" or "computes".
    """

    def __init__(self, batch_s: float, kind: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
        self._batch_s = batch_s
        self._kind = kind

    def __len__(self) -> int:
        """Return the number of samples."""
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        """Return a sample without delay."""
        return self._inputs[number], number % 10

    def minibatch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch after its loading time."""
        if self._kind == "waits":
            time.sleep(self._batch_s)
        until_s = time.process_time() + self._batch_s
        while self._kind == "computes" and time.process_time() < until_s:
            pass
        return self._inputs[indices], indices % 10


def network() -> nn.Module:
    """Return a network whose gradient takes about ten milliseconds."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def main() -> None:
    parser = options(__doc__ or "", rounds=7)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--n", type=int, default=4, help="number of simulated workers (default 4)")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--loader-workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--protocol", default="bsp")
    parser.add_argument("--kinds", nargs="+", default=["waits", "computes"])
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    free = Costly(0.0, "waits")
    run(args, free)  # warm-up round
    gradient_s = run(args, free) / (args.updates * args.n)
    results = {kind: compared(args, free, Costly(gradient_s, kind)) for kind in args.kinds}
    report(
        "loader",
        args,
        {
            "bar": f"at most {BAR} x the run without data cost",
            "gradient_ms": rounded(1e3 * gradient_s),
            **results,
        },
    )


def compared(args: argparse.Namespace, free: Costly, costly: Costly) -> dict[str, Any]:
    """Return the times and ratios of alternating runs."""
    runs = {
        "free": partial(run, args, free),
        "in_line": partial(run, args, costly),
        "background": partial(run, args, costly, args.loader_workers),
        "background_free": partial(run, args, free, args.loader_workers),
    }
    for each in runs.values():
        each()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, each in runs.items():
            times[name].append(each())
    ratio = ratios(times["background"], times["free"])
    return {
        **{f"{name}_s": spread(seconds) for name, seconds in times.items()},
        "in_line_ratio": ratios(times["in_line"], times["free"]),
        "background_free_ratio": ratios(times["background_free"], times["free"]),
        "background_ratio": {**ratio, "meets_bar": ratio["median"] <= BAR},
    }


class Since(pl.callbacks.Callback):
    """Callback that records the time of the first update, when all processes have started."""

    def __init__(self) -> None:
        self.begun_s = 0.0

    def on_update(self, update: Any) -> None:
        """Record the time of the first update."""
        self.begun_s = self.begun_s or perf_counter()


def run(args: argparse.Namespace, data: Costly, loader_workers: int = 0) -> float:
    """Return the seconds of a run from its first update on, times updates / (updates - 1)."""
    job = pl.Job(
        model=network,
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        data=data,
        batch_size=args.batch_size,
        loader_workers=loader_workers,
    )
    since = Since()
    pl.train(
        job,
        protocol=args.protocol,
        cluster=pl.Cluster(args.n, pl.timing.Exponential(mean_s=1.0)),
        stop=pl.Stop(updates=args.updates),
        callbacks=[since],
    )
    seconds = perf_counter() - since.begun_s
    return float(seconds * args.updates / (args.updates - 1))


if __name__ == "__main__":
    main()
