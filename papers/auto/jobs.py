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
from papers.auto.settings import Case
from papers.gpt import gpt
from papers.probe import One, probe


def make_job(case: Case, lr: float, lr_rule: str, folder: Path, *, has_unseen: bool = False) -> pl.Job:
    """Return the job of a case, which is evaluated on the data of its target.

    Args:
        lr: learning rate of the optimizer.
        lr_rule: "constant" or "noise".
        folder: folder with the folders of the data sets.
        has_unseen: whether the evaluation is on unseen data instead, the test set of MNIST.
    """
    job = _JOBS[case.job](folder)
    optimizer = partial(torch.optim.AdamW if case.job == "gpt" else torch.optim.SGD, lr=lr)
    if has_unseen and case.job == "mnist":
        job = replace(job, eval_data=_unseen_digits(folder))
    changes = {
        "batch_size": case.batch_size,
        "microbatches": case.microbatches,
        "lr_rule": lr_rule,
        "optimizer": optimizer,
    }
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


@lru_cache(maxsize=1)
def _unseen_digits(folder: Path) -> One:
    data = pl.jobs.mnist(folder=folder / "mnist").eval_data
    assert isinstance(data, ImageDataset)
    return One.of(data)


_JOBS: dict[str, Callable[[Path], pl.Job]] = {"digits": _digits, "mnist": _mnist, "gpt": gpt}
