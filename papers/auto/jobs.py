"""Jobs of the cases, each evaluated on a fixed batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.jobs.datasets.images import ImageDataset
from papers.auto.gpt import gpt
from papers.auto.settings import Case
from papers.probe import One, probe


def make_job(case: Case, lr: float, lr_rule: str, folder: Path) -> pl.Job:
    """Return the job of a case.

    Args:
        lr: learning rate of the optimizer.
        lr_rule: "constant" or "noise".
        folder: folder with the folders of the data sets.
    """
    job = _JOBS[case.job](folder)
    optimizer = partial(torch.optim.AdamW if case.job == "gpt" else torch.optim.SGD, lr=lr)
    changes = {"batch_size": case.batch_size, "lr_rule": lr_rule, "optimizer": optimizer}
    return replace(job, **changes)  # type: ignore[arg-type]  # values of different types


@lru_cache(maxsize=1)
def _digits(folder: Path) -> pl.Job:
    job = pl.jobs.digits(model="net")
    assert isinstance(job.data, TensorDataset)
    images, labels = job.data.tensors
    return replace(job, eval_data=One((images, labels)))


@lru_cache(maxsize=1)
def _mnist(folder: Path) -> pl.Job:
    job = pl.jobs.mnist(folder=folder / "mnist")
    assert isinstance(job.data, ImageDataset)
    sample = probe(job.data)
    return replace(job, model=pl.jobs.DBWNet, eval_data=One.of(sample))


_JOBS: dict[str, Callable[[Path], pl.Job]] = {"digits": _digits, "mnist": _mnist, "gpt": gpt}
