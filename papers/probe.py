"""The fixed probe of training samples that the papers' losses are measured on."""

from __future__ import annotations

import torch

from paceline.jobs.images import ImageDataset

PROBE_SAMPLES = 6000
PROBE_SEED = 0


def probe(data: ImageDataset) -> ImageDataset:
    """Return 6,000 samples of the training data, always the same."""
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(PROBE_SEED))[:PROBE_SAMPLES]
    return ImageDataset(
        data.images[chosen], data.labels[chosen], data.mean.flatten().tolist(), data.std.flatten().tolist()
    )
