"""Digest of the first and the last sample, by which ranks that read other data are noticed."""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.checkpoint.fingerprint import digest_of
from paceline.user_loop.data.loader_checks import draws_itself
from paceline.worker.seeding import seeded, set_seed

SEED = 0


def sample_digest(loader: DataLoader[Any]) -> str:
    """Return a digest of the first and the last sample, empty if each access draws them anew, or if there are none.

    The samples are read where the DataLoader reads them: files that a data set opens at its first access may not be
    open before its processes start.
    """
    if draws_itself(loader) or not isinstance(loader.dataset, Sized) or not len(loader.dataset):
        return ""
    last = len(loader.dataset) - 1
    reading = DataLoader(
        loader.dataset,
        batch_sampler=[[0, last]] * 2,
        collate_fn=_digest,
        num_workers=min(loader.num_workers, 1),
        worker_init_fn=partial(_start, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context if loader.num_workers else None,
        timeout=loader.timeout,
        generator=torch.Generator(),
    )
    with seeded(SEED):
        first, second = reading
    return str(first) if first == second else ""


def _start(of_the_user: Callable[[int], object] | None, worker: int) -> None:
    if of_the_user is not None:
        of_the_user(worker)
    set_seed(SEED)  # last, since that function may set another seed


def _digest(samples: list[Any]) -> str:
    """Return the digest of two samples; an augmentation draws the same numbers for the next two."""
    digest = digest_of(samples)
    set_seed(SEED)
    return digest
