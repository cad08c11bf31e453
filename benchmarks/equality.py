"""BSP on n workers against a plain loop over the same minibatches: the parameters must be equal."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline as pl
from common import options, report, rounded
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model

BAR = 1e-12
SAMPLES, FEATURES, HIDDEN, CLASSES, BATCH = 2000, 20, 50, 10, 32


def main() -> None:
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--updates", type=int, default=200)
    args = parser.parse_args()

    results = {}
    for n in (1, 2, 4):
        clusters: dict[str, pl.Cluster | pl.LocalCluster] = {
            "virtual": pl.Cluster(n),
            "local": pl.LocalCluster(n, threads=1),
        }
        for engine, cluster in clusters.items():
            worst = max(
                difference(
                    plain_loop(make_job(), n, args.updates, seed),
                    pl.train(
                        make_job(), protocol=pl.bsp(), cluster=cluster, stop=pl.Stop(updates=args.updates), seed=seed
                    ).model,
                )
                for seed in range(args.rounds)
            )
            results[f"{engine}, n={n}"] = {"largest_relative_difference": rounded(worst), "meets_bar": worst <= BAR}
    report("equality", args, {"bar": f"at most {BAR:g}, every seed", **results})


def make_job() -> pl.Job:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return pl.Job(
        model=make_model,
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
        data=TensorDataset(inputs, labels),
        batch_size=BATCH,
    )


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double()


def plain_loop(job: pl.Job, n: int, updates: int, seed: int) -> nn.Module:
    """Train in one process: an update is one large batch of the minibatches of all workers."""
    loader = MinibatchLoader(job, seed, n)
    model = build_model(job, seed)
    optimizer = job.optimizer(model.parameters())
    for draw in range(1, updates + 1):
        batches = [loader.batch(worker, draw, None) for worker in range(n)]
        inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


def difference(expected: nn.Module, got: nn.Module) -> float:
    """Return the largest difference of a parameter, relative to the largest entry of its tensor."""
    pairs = zip(expected.state_dict().values(), got.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


if __name__ == "__main__":
    main()
