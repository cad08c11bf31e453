from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.job import Job
from paceline.jobs.common import MakeModel, choose_model, fetch_advice, sgd
from paceline.jobs.images import ImageDataset, crop_and_flip
from paceline.jobs.models import SoftmaxRegression, resnet18, resnet20, resnet32

CLASSES = 10
IMAGE_SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_MODELS: dict[str, MakeModel] = {
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet32": resnet32,
    "softmax": partial(SoftmaxRegression, RECORD_BYTES - 1, CLASSES),
}


def cifar10(
    model: str = "resnet20",
    batch_size: int = 128,
    lr: float = 0.1,
    momentum: float = 0.9,
    augment: bool | None = None,
    folder: str | Path = "data/cifar-10-batches-bin",
) -> Job:
    """Return a job on CIFAR-10: 50,000 training images, 10,000 for evaluation.

    A sample is float32 ``[3, 32, 32]``, normalised by channel to mean 0 and standard deviation 1 over the
    training set; the optimizer is SGD with weight decay 1e-4.

    Args:
        model: "resnet20", "resnet32", "resnet18" or "softmax".
        batch_size: samples a gradient.
        lr: learning rate, > 0.
        momentum: of SGD, in [0, 1).
        augment: whether training images are shifted and mirrored at random; by default only for a ResNet.
        folder: where the files of the standard binary version are.

    Raises:
        UsageError: the files are missing or damaged, or there is no such model.

    Reference: He et al., "Deep Residual Learning", 2016, section 4.2, whose settings Sync-Switch
    (Li et al., ICDCS 2021) takes over.
    """
    folder = Path(str(folder))  # the command line reads a folder called 2024 as a number
    make_model, optimizer = choose_model(model, _MODELS), sgd(lr, momentum, weight_decay=1e-4)
    if augment not in (None, True, False):
        raise UsageError(f"augment={augment!r} is not true or false")
    if augment is None:
        augment = model != "softmax"
    with fetch_advice("cifar10", folder):
        images, labels = _read(folder, [f"data_batch_{k}.bin" for k in range(1, 6)])
        test = ImageDataset(*_read(folder, ["test_batch.bin"]), MEAN, STD)
    return Job(
        name=f"cifar10-{model}",
        model=make_model,
        optimizer=optimizer,
        data=ImageDataset(images, labels, MEAN, STD, augment=crop_and_flip if augment else None),
        batch_size=batch_size,
        loss=F.cross_entropy,
        eval_data=test,
    )


def _read(folder: Path, names: list[str]) -> tuple[Tensor, Tensor]:
    records = torch.cat([_records(folder / name) for name in names])
    return records[:, 1:].reshape(-1, *IMAGE_SHAPE), records[:, 0].long()


def _records(path: Path) -> Tensor:
    try:
        content = bytearray(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}") from error
    if not content or len(content) % RECORD_BYTES:
        raise UsageError(f"'{path}' holds {len(content)} bytes; expected a multiple of {RECORD_BYTES}, one record")
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, RECORD_BYTES)
    if records[:, 0].max() >= CLASSES:
        raise UsageError(f"'{path}' holds label {records[:, 0].max()}; expected 0 to {CLASSES - 1}")
    return records
