"""The paper's two jobs, with the fixed probe of training samples on which its losses are measured."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

import paceline as pl
from paceline.jobs.datasets.images import ImageDataset
from papers.probe import probe


class ChannelsLast(nn.Module):
    """Model whose input images have the channels last in memory: equal values in two thirds of the time.

    Args:
        model: wrapped model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return the output of the model for images ``[batch, C, H, W]``."""
        out: Tensor = self.model(images.to(memory_format=torch.channels_last))
        return out


def make_job(name: str, batch_size: int, lr: float, lr_rule: str, folder: Path) -> pl.Job:
    """Return a job of the paper, evaluated on the probe.

    Args:
        name: "mnist" or "cifar10".
        lr_rule: "constant" or "proportional".
        folder: folder of the data set.
    """
    job = replace(_mnist(folder) if name == "mnist" else _cifar10(folder))
    changes = {"batch_size": batch_size, "lr_rule": lr_rule, "optimizer": partial(torch.optim.SGD, lr=lr)}
    return replace(job, **changes)  # type: ignore[arg-type]  # values of different types


@lru_cache(maxsize=1)
def _mnist(folder: Path) -> pl.Job:
    job = pl.jobs.mnist(folder=folder)
    assert isinstance(job.data, ImageDataset)
    return replace(job, model=_dbw_net, eval_data=probe(job.data))


@lru_cache(maxsize=1)
def _cifar10(folder: Path) -> pl.Job:
    """Return ResNet-18 with plain SGD; the images are split uniformly at random among the workers (Sect. 4)."""
    job = pl.jobs.cifar10(model="resnet18", folder=folder, augment=False)
    return replace(job, sharding="partitioned")


def _dbw_net() -> nn.Module:
    return ChannelsLast(pl.jobs.DBWNet())
