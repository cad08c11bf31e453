"""Jobs of the comparison, each evaluated on a fixed batch of unseen data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch

import paceline as pl
from paceline.jobs.datasets.images import ImageDataset
from papers.ddp.settings import JOBS
from papers.gpt import gpt
from papers.probe import One

VALIDATION_SAMPLES = 2_000  # of MNIST's test images


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
    optimizer = partial(torch.optim.AdamW if about.optimizer == "adamw" else torch.optim.SGD, lr=lr)
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=about.gradients[n])
    changes = {
        "batch_size": about.batch_size,
        "optimizer": optimizer,
        "lr_rule": lr_rule,
        "scheduler": cosine if about.optimizer == "adamw" else None,
    }
    return replace(_JOBS[name](folder), **changes)  # type: ignore[arg-type]  # values of different types


@lru_cache(maxsize=1)
def _mnist(folder: Path) -> pl.Job:
    job = pl.jobs.mnist(folder=folder / "mnist")
    unseen = job.eval_data
    assert isinstance(unseen, ImageDataset)
    chosen = unseen.minibatch(torch.arange(VALIDATION_SAMPLES))
    return replace(job, model=pl.jobs.DBWNet, eval_data=One(chosen))


def _digits(folder: Path) -> pl.Job:
    return pl.jobs.digits(model="net")


_JOBS: dict[str, Callable[[Path], pl.Job]] = {"mnist": _mnist, "gpt": gpt, "digits": _digits}
