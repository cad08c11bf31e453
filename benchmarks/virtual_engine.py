"""Cost of simulation: the virtual engine against a bare loop that computes the same gradients.

K-sync with k of n workers. The bare loop is given the accepted gradients beforehand, draws the same
minibatches and sums plain autograd gradients. It simulates and records nothing, and uses no flat vectors.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from common import options, ratios, report, spread
from paceline.core.records import GradientArrived, UpdateMade
from paceline.errors import UsageError
from paceline.jobs import DBWNet
from paceline.jobs.datasets.images import ImageDataset
from paceline.recording.history import History
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model

BAR = 1.10
SEED = 0
Work = tuple[int, int]  # worker and draw


def main() -> None:
    args = mnist_run(options(__doc__ or "")).parse_args()

    torch.set_num_threads(args.threads)
    job = make_job(args.folder, args.batch_size)
    cluster = pl.Cluster(args.n, pl.timing.Exponential(mean_s=1.0))
    protocol = pl.k_sync(k=args.k)
    stop = pl.Stop(updates=args.updates)

    trained = pl.train(job, protocol=protocol, cluster=cluster, stop=stop, seed=SEED)  # warm-up round
    accepted = accepted_work(trained.history)
    bare = bare_loop(job, args.n, accepted)
    ours_s, bare_s = [], []
    for _ in range(args.rounds):
        begun = perf_counter()
        pl.train(job, protocol=protocol, cluster=cluster, stop=stop, seed=SEED)
        ours_s.append(perf_counter() - begun)
        begun = perf_counter()
        bare_loop(job, args.n, accepted)
        bare_s.append(perf_counter() - begun)
    ratio = ratios(ours_s, bare_s)
    report(
        "virtual_engine",
        args,
        {
            "bar": f"at most {BAR} times the bare loop, median of the ratios round by round, wall clock",
            "data": job.name,
            "gradients": sum(len(update) for update in accepted),
            "ours_s": spread(ours_s),
            "bare_loop_s": spread(bare_s),
            "ratio": {**ratio, "meets_bar": ratio["median"] <= BAR},
            "largest_difference_of_parameters": difference(trained.model, bare),
        },
    )


def mnist_run(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of the MNIST run."""
    parser.add_argument("--folder", type=Path, default=Path("../shared/data/mnist"))
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    return parser


def make_job(folder: Path, batch_size: int) -> pl.Job:
    """Return the MNIST job without evaluation data: only gradients are timed."""
    try:
        return replace(pl.jobs.mnist(batch_size=batch_size, folder=folder), eval_data=None)
    except UsageError:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (60_000, 1, 28, 28), dtype=torch.uint8, generator=generator)
        labels = torch.randint(10, (60_000,), generator=generator)
        return pl.Job(
            name="random images of MNIST's shape",
            model=DBWNet,
            optimizer=partial(torch.optim.SGD, lr=0.08),
            data=ImageDataset(images, labels, mean=[0.1307], std=[0.3081]),
            batch_size=batch_size,
            loss=F.cross_entropy,
        )


def accepted_work(history: History) -> list[list[Work]]:
    """Return the accepted gradients of each update in the order of their arrival."""
    updates: list[list[Work]] = []
    held: list[Work] = []
    for record in history.records:
        match record:
            case GradientArrived(used=True):
                held.append((record.worker, record.draw))
            case UpdateMade():
                updates.append(held)
                held = []
    return updates


def bare_loop(job: pl.Job, n: int, updates: list[list[Work]]) -> nn.Module:
    assert job.loss is not None
    loader = MinibatchLoader(job, SEED, n)
    model = build_model(job, SEED)
    optimizer = job.optimizer(model.parameters())
    for update in updates:
        optimizer.zero_grad()
        for worker, draw in update:
            inputs, labels = loader.batch(worker, draw, None)
            loss = job.loss(model(inputs), labels) / len(update)
            loss.backward()
            loss.item()
        optimizer.step()
    return model


def difference(ours: nn.Module, bare: nn.Module) -> float:
    pairs = zip(ours.state_dict().values(), bare.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


if __name__ == "__main__":
    main()
