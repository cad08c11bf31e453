"""Image data sets in memory, one byte per pixel, normalised when a batch is made."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from paceline.errors import UsageError

PADDING = 4


class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Labelled images in memory, one byte per pixel; a sample is ``(pixel / 255 - mean) / std`` and its label.

    Args:
        images: uint8 ``[N, C, H, W]``.
        labels: int64 ``[N]``.
        mean: mean of each channel, on the scale [0, 1].
        std: standard deviation of each channel, on the scale [0, 1], > 0.
        augment: function of a batch of bytes ``[B, C, H, W]``, applied whenever the batch is drawn; None for none.

    Raises:
        UsageError: a tensor has another dtype or shape.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise UsageError(f"images are {_describe(images)}; give uint8 [N, C, H, W]")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise UsageError(f"labels are {_describe(labels)}; give int64 [{len(images)}], one per image")
        self.images = images
        self.labels = labels
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one image, float32 ``[C, H, W]``, and its label, int64 ``[]``."""
        images, labels = self.minibatch(torch.tensor([index]))
        return images[0], labels[0]

    def minibatch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples at ``indices``, int64 ``[B]``: float32 ``[B, C, H, W]`` and int64 ``[B]``.

        The loader calls this instead of collating single samples.
        """
        images = self.images[indices]
        if self.augment:
            images = self.augment(images)
        return (images / 255).sub_(self.mean).div_(self.std), self.labels[indices]


def crop_and_flip(images: Tensor) -> Tensor:
    """Shift each image by up to 4 pixels per side, with black beyond the border, and mirror half of them at random.

    Maps ``[B, C, H, W]`` to the same shape. It draws from torch's global generator, which the loader seeds for each
    draw, so a minibatch does not depend on the worker or the time.

    Reference: the augmentation of He et al. 2016, section 4.2.
    """
    size, _, height, width = images.shape
    top, left = torch.randint(2 * PADDING + 1, (2, size, 1))
    mirrored = torch.rand(size, 1) < 0.5
    rows = top + torch.arange(height)
    columns = left + torch.where(mirrored, torch.arange(width - 1, -1, -1), torch.arange(width))
    padded = F.pad(images, (PADDING,) * 4).permute(0, 2, 3, 1)
    sample = torch.arange(size)[:, None, None]
    return padded[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
