"""Fixed probe of training samples, on which the papers' models are evaluated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.jobs.datasets.images import ImageDataset

PROBE_SAMPLES = 6000
PROBE_SEED = 0


def probe(data: ImageDataset) -> ImageDataset:
    """Return a fixed choice of 6,000 samples of the training data."""
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(PROBE_SEED))[:PROBE_SAMPLES]
    return ImageDataset(
        data.images[chosen], data.labels[chosen], data.mean.flatten().tolist(), data.std.flatten().tolist()
    )


class One(Dataset[tuple[Tensor, Tensor]]):
    """Data set whose only item is a batch, so that it is evaluated in one pass for any minibatch size."""

    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        self._batch = batch

    @classmethod
    def of(cls, data: ImageDataset) -> One:
        """Return a data set of one batch with all samples of `data`, in their order."""
        return cls(data.minibatch(torch.arange(len(data))))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the batch."""
        return self._batch

    def minibatch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch."""
        return self._batch
