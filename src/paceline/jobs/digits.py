from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.utils.data import TensorDataset

from paceline.errors import UsageError
from paceline.jobs.job import Job
from paceline.jobs.lr_options import MakeModel, choose_model, classification, sgd
from paceline.jobs.models.small import SmallNet, SoftmaxRegression
from paceline.utils.argument_types import checked_types

TRAINING_SAMPLES = 1437
_PIXELS, _CLASSES, _DARKEST = 64, 10, 16.0
_MODELS: dict[str, MakeModel] = {
    "net": partial(SmallNet, _PIXELS, 64, _CLASSES),
    "softmax": partial(SoftmaxRegression, _PIXELS, _CLASSES),
}
_LR = {"net": 0.1, "softmax": 0.5}


@checked_types
def digits(model: str = "softmax", batch_size: int = 32, lr: float | None = None, momentum: float = 0.0) -> Job:
    """Return a job that trains in seconds: scikit-learn's handwritten digits, 1437 for training, 360 for evaluation.

    A sample is float32 ``[64]``, an 8x8 image scaled to [0, 1]. The split is shuffled with a fixed seed. The
    optimizer is SGD.

    Args:
        model: "softmax" (convex) or "net" (one hidden layer of 64 units).
        batch_size: samples per gradient, >= 1.
        lr: learning rate, > 0; by default 0.5 for "softmax" and 0.1 for "net", which reach a training loss of
            0.2 in about 500 updates, also with the staleness of 4 asynchronous workers.
        momentum: momentum of SGD, in [0, 1).

    Raises:
        UsageError: scikit-learn is not installed, or there is no such model.
    """
    make_model = choose_model(model, _MODELS)
    optimizer = sgd(_LR[model] if lr is None else lr, momentum)
    train, test = _split()
    return classification(
        name=f"digits-{model}", model=make_model, optimizer=optimizer, train=train, test=test, batch_size=batch_size
    )


def _split() -> tuple[TensorDataset, TensorDataset]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("this job needs scikit-learn; run: pip install 'paceline[digits]'") from error
    pixels, labels = _pixels_and_labels(load_digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels / _DARKEST, dtype=torch.float32)[order]
    targets = torch.tensor(labels, dtype=torch.int64)[order]
    train, test = slice(TRAINING_SAMPLES), slice(TRAINING_SAMPLES, None)
    return TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test])


@cache
def _pixels_and_labels(load: Callable[..., Any]) -> Any:
    """Return scikit-learn's arrays, which it reads from a compressed text in 30 ms."""
    return load(return_X_y=True)
