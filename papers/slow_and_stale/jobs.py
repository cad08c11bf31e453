"""The paper's two jobs: softmax regression with a penalty on its weights, on MNIST and on grey CIFAR-10 (Sect. 9)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline as pl
from paceline.jobs import SoftmaxRegression
from paceline.jobs.datasets.images import ImageDataset
from paceline.jobs.job import Batch, Metrics
from papers.probe import One, probe
from papers.slow_and_stale.settings import Case

GREY = (0.2989, 0.5870, 0.114)  # weights of red, green, blue
CLASSES = 10

Scale = tuple[float, float]
SCALES: dict[str, dict[str, Scale]] = {
    # mean and standard deviation with which pixels in [0, 1] are normalised
    "mnist": {"0 to 1": (0.0, 1.0)},
    "cifar10": {"0 to 1": (0.0, 1.0), "0 to 255": (0.0, 1 / 255), "normalised": (0.4812, 0.2391)},
}


class Regularised:
    """Loss of a minibatch: mean cross entropy + regulariser ||W||^2, without the biases.

    Args:
        regulariser: the paper's lamda, >= 0.
    """

    def __init__(self, regulariser: float) -> None:
        self.regulariser = regulariser

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the loss, and in evaluation also the accuracy."""
        inputs, target = batch
        logits, weights = model(inputs), next(model.parameters())
        loss = F.cross_entropy(logits, target) + self.regulariser * weights.square().sum()
        if model.training:
            return loss, {}
        return loss, {"accuracy": (logits.argmax(dim=1) == target).float().mean()}


def make_job(case: Case, lr: float, folder: Path) -> pl.Job:
    """Return the job of a case.

    Args:
        lr: learning rate.
        folder: folder with the folders of the data sets.
    """
    data = _data(case.data, folder)
    mean, std = SCALES[case.data][case.pixels]
    scaled = ImageDataset(data.images, data.labels, [mean], [std])
    sample = probe(scaled)
    return pl.Job(
        name=f"{case.data}-softmax",
        model=partial(SoftmaxRegression, data.images[0].numel(), CLASSES),
        optimizer=partial(torch.optim.SGD, lr=lr),
        data=scaled,
        batch_size=case.batch_size,
        step=Regularised(case.regulariser),
        eval_data=One.of(sample),
    )


def grey(images: Tensor) -> Tensor:
    """Return grey images, uint8 ``[N, 1, H, W]``, from colour images, uint8 ``[N, 3, H, W]``."""
    parts = [images[:, i].float() * share for i, share in enumerate(GREY)]
    return sum(parts[1:], parts[0]).round().clamp(0, 255).to(torch.uint8)[:, None]


@lru_cache(maxsize=1)
def _data(name: str, folder: Path) -> ImageDataset:
    data = _READERS[name](folder)
    assert isinstance(data, ImageDataset)
    return data


def _mnist(folder: Path) -> Dataset[object]:
    return pl.jobs.mnist(model="softmax", folder=folder / "mnist").dataset


def _grey_cifar10(folder: Path) -> Dataset[object]:
    coloured = pl.jobs.cifar10(model="softmax", folder=folder / "cifar-10-batches-bin").data
    assert isinstance(coloured, ImageDataset)
    return ImageDataset(grey(coloured.images), coloured.labels, [0.0], [1.0])


_READERS: dict[str, Callable[[Path], Dataset[object]]] = {"mnist": _mnist, "cifar10": _grey_cifar10}
