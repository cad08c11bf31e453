"""The jobs of the set-ups, with the paper's rule for the learning rate and its schedules (Sect. IV-A)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from pytorch_optimizer import LARS, Lamb
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline as pl
from paceline.jobs.datasets.images import ImageDataset
from papers.dc_s3gd.settings import (
    DECAY_FACTOR,
    EPOCHS,
    LR_BATCH,
    MOMENTUM,
    WEIGHT_DECAY,
    OptimizerName,
    Setup,
    Theirs,
)
from papers.probe import One

HIDDEN, CLASSES = 64, 10
SGD = partial(torch.optim.SGD, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
OPTIMIZERS: Mapping[OptimizerName, Callable[..., Any]] = {
    "sgd": SGD,
    "lars": partial(LARS, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
    "lamb": partial(Lamb, weight_decay=WEIGHT_DECAY),
}


def make_job(setup: Setup, folder: Path) -> pl.Job:
    """Return the job of a set-up, with data from a folder with the folders of the data sets."""
    job = _JOBS[setup.job](folder)
    return as_in_the_paper(job, setup.lr, setup.minibatch, setup.schedule, OPTIMIZERS[setup.optimizer])


def imagenet_job(row: Theirs, data: Dataset[Any], eval_data: Dataset[Any] | None = None) -> pl.Job:
    """Return the job of a row of Table I, with one worker per node.

    The project contains neither ImageNet-1k nor a reader for it.

    Args:
        row: row of the table.
        data: training data, pairs of a float image ``[3, 224, 224]`` and its class, one of 1,000.
        eval_data: evaluation data in the same form.
    """
    stem: dict[str, Any] = {} if row.model == "vgg16" else {"stem": "imagenet"}
    job = pl.Job(
        name=f"imagenet-{row.model}",
        model=partial(getattr(pl.jobs, row.model), classes=1000, **stem),
        optimizer=torch.optim.SGD,
        data=data,
        batch_size=row.batch_size // row.nodes,
        loss=F.cross_entropy,
        eval_data=eval_data,
        sampling="epoch",
    )
    schedule = pl.plans.LinearSchedule(
        warm_up="50%", warm_up_until=f"epochs={row.warm_up_epochs}", weight_decay=DECAY_FACTOR
    )
    return as_in_the_paper(job, row.lr, job.batch_size, replace(schedule, total=f"epochs={EPOCHS}"))


def as_in_the_paper(
    job: pl.Job, lr: float, minibatch: int, schedule: pl.plans.LinearSchedule, optimizer: Callable[..., Any] = SGD
) -> pl.Job:
    """Return the job at N eta_sn, with schedules for learning rate and weight decay, and no decay of norms.

    Args:
        lr: eta_sn, learning rate for 256 samples.
        minibatch: samples per worker.
        schedule: schedule of learning rate and weight decay.
        optimizer: optimizer, given parameters and `lr`.
    """
    rate = lr * minibatch / LR_BATCH
    return pl.jobs.scheduled(
        replace(
            job,
            optimizer=partial(optimizer, lr=rate),
            batch_size=minibatch,
        ),
        lr_rule="proportional",
        lr_is="per_worker",
        schedule=schedule,
        decay_norms=False,
    )


@lru_cache(maxsize=1)
def _mnist(folder: Path) -> pl.Job:
    return _small(pl.jobs.mnist(folder=folder / "mnist"), "mnist-net", 28 * 28)


@lru_cache(maxsize=1)
def _cifar10(folder: Path) -> pl.Job:
    job = pl.jobs.cifar10(model="softmax", folder=folder / "cifar-10-batches-bin")
    return _small(job, "cifar10-net", 3 * 32 * 32)


@lru_cache(maxsize=1)
def _cifar10_network(model: str, folder: Path) -> pl.Job:
    return pl.jobs.cifar10(model=model, folder=folder / "cifar-10-batches-bin")


def _small(job: pl.Job, name: str, pixels: int) -> pl.Job:
    assert isinstance(job.eval_data, ImageDataset)
    model: Callable[[], nn.Module] = partial(pl.jobs.SmallNet, pixels, HIDDEN, CLASSES)
    return replace(job, name=name, model=model, eval_data=One.of(job.eval_data))


_JOBS: dict[str, Callable[[Path], pl.Job]] = {
    "mnist": _mnist,
    "cifar10": _cifar10,
    "cifar10-resnet20": partial(_cifar10_network, "resnet20"),
    "cifar10-resnet50": partial(_cifar10_network, "resnet50"),
    "cifar10-vgg16": partial(_cifar10_network, "vgg16"),
}
