"""What the papers' models are measured on: a fixed probe of training samples, and batches evaluated at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.jobs.datasets.images import ImageDataset

PROBE_SAMPLES = 6000
PROBE_SEED = 0


def probe(data: ImageDataset) -> ImageDataset:
    """Return 6,000 samples of the training data, always the same."""
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(PROBE_SEED))[:PROBE_SAMPLES]
    return ImageDataset(
        data.images[chosen], data.labels[chosen], data.mean.flatten().tolist(), data.std.flatten().tolist()
    )


class One(Dataset[tuple[Tensor, Tensor]]):
    """A batch as data of one item, so that it is evaluated at once, however small the minibatches are."""

    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        self._batch = batch

    @classmethod
    def of(cls, data: ImageDataset) -> One:
        """Return all samples of a data set, in their order."""
        return cls(data.minibatch(torch.arange(len(data))))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return all of it."""
        return self._batch

    def minibatch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return all of it."""
        return self._batch
