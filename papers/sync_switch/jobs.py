"""Jobs of the set-ups, with the paper's schedule and its rule for the learning rate (Sect. IV-C and VI-A)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import paceline as pl
from paceline.jobs import SmallNet
from paceline.jobs.datasets.images import ImageDataset
from papers.probe import One
from papers.sync_switch.settings import DECAY_AT, MOMENTUM, Setup

PIXELS, HIDDEN, CLASSES = 28 * 28, 64, 10


def make_job(setup: Setup, lr: float, batch_size: int, workload: int, folder: Path) -> pl.Job:
    """Return the job of a set-up.

    Args:
        lr: learning rate per gradient; an update of k gradients uses k times this rate.
        batch_size: samples per worker.
        workload: gradients of the whole run, the unit of the decay.
        folder: folder with the folders of the data sets.
    """
    job = _JOBS[setup.job](folder)
    assert isinstance(job.optimizer, partial)  # momentum of SGD
    return pl.jobs.scheduled(
        replace(job, optimizer=partial(job.optimizer, lr=lr, momentum=MOMENTUM), batch_size=batch_size),
        lr_rule="proportional",
        lr_is="per_worker",
        decay_at=[int(share * workload) for share in DECAY_AT],
    )


@lru_cache(maxsize=1)
def _mnist(folder: Path) -> pl.Job:
    job = pl.jobs.mnist(folder=folder / "mnist")
    assert isinstance(job.eval_data, ImageDataset)
    return replace(
        job, name="mnist-net", model=partial(SmallNet, PIXELS, HIDDEN, CLASSES), eval_data=One.of(job.eval_data)
    )


@lru_cache(maxsize=1)
def _cifar10(folder: Path) -> pl.Job:
    return pl.jobs.cifar10(model="resnet32", folder=folder / "cifar-10-batches-bin")


@lru_cache(maxsize=1)
def _cifar100(folder: Path) -> pl.Job:
    return pl.jobs.cifar100(model="resnet50", folder=folder / "cifar-100-binary")


_JOBS: dict[str, Callable[[Path], pl.Job]] = {
    "mnist": _mnist,
    "cifar10-resnet32": _cifar10,
    "cifar100-resnet50": _cifar100,
}
