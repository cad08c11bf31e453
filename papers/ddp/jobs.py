"""Jobs of the comparison, each evaluated on a fixed batch of unseen data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

import paceline as pl
from paceline.jobs.datasets.images import ImageDataset
from papers.ddp.settings import JOBS
from papers.ddp.smollm2 import smollm2
from papers.gpt import gpt
from papers.probe import One

VALIDATION_SAMPLES = 2_000  # of the test images


def make_job(name: str, n: int, lr: float, lr_rule: str, folder: Path) -> pl.Job:
    """Return a job for n workers.

    Args:
        name: name of the job.
        n: number of workers, whose runs have a length of their own.
        lr: learning rate of the optimizer.
        lr_rule: "constant", "proportional" or "noise".
        folder: folder with the folders of the data sets.
    """
    about = JOBS[name]
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=about.gradients[n])
    changes = {
        "batch_size": about.batch_size,
        "optimizer": partial(_OPTIMIZERS[about.optimizer], lr=lr),
        "lr_rule": lr_rule,
        "scheduler": cosine if about.cosine else None,
    }
    return replace(_JOBS[name](folder), **changes)  # type: ignore[arg-type]  # values of different types


class ChannelsLast(nn.Module):
    """Network whose input is in the memory format that takes half of the time on a CPU.

    Args:
        network: network on images ``[batch, channels, height, width]``.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the network."""
        out: Tensor = self.network(x.to(memory_format=torch.channels_last))
        return out


def _channels_last(network: Callable[[], nn.Module]) -> nn.Module:
    return ChannelsLast(network())


@lru_cache(maxsize=1)
def _mnist(folder: Path) -> pl.Job:
    job = pl.jobs.mnist(folder=folder / "mnist")
    unseen = job.eval_data
    assert isinstance(unseen, ImageDataset)
    chosen = unseen.minibatch(torch.arange(VALIDATION_SAMPLES))
    return replace(job, model=partial(_channels_last, pl.jobs.DBWNet), eval_data=One(chosen))


@lru_cache(maxsize=1)
def _resnet20(folder: Path) -> pl.Job:
    job = pl.jobs.cifar10(model="resnet20", folder=folder / "cifar-10-batches-bin")
    unseen = job.eval_data
    assert isinstance(unseen, ImageDataset)
    chosen = unseen.minibatch(torch.arange(VALIDATION_SAMPLES))
    return replace(job, model=partial(_channels_last, pl.jobs.resnet20), eval_data=One(chosen))


def _digits(folder: Path) -> pl.Job:
    return pl.jobs.digits(model="net")


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4),
    "adamw": torch.optim.AdamW,
}

_JOBS: dict[str, Callable[[Path], pl.Job]] = {
    "mnist": _mnist,
    "gpt": gpt,
    "resnet20": _resnet20,
    "smollm2": smollm2,
    "digits": _digits,
}
