from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.jobs.datasets.images import ImageDataset, crop_and_flip
from paceline.jobs.job import Job
from paceline.jobs.lr_options import choose_model, classification, fetch_advice, sgd
from paceline.jobs.models.resnet import resnet18, resnet20, resnet32, resnet50, resnet101, resnet152
from paceline.jobs.models.small import SoftmaxRegression
from paceline.jobs.models.vgg import vgg16
from paceline.utils.argument_types import checked_types
from paceline.utils.files import ContentError, read_bytes
from paceline.utils.wording import counted

IMAGE_SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
MOST_BYTES = 1 << 30
_NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet32": resnet32,
    "resnet50": resnet50,
    "resnet101": partial(resnet101, stem="small"),
    "resnet152": partial(resnet152, stem="small"),
    "vgg16": partial(vgg16, image_size=32),
}


@dataclass(frozen=True, kw_only=True)
class _Files:
    """Files of a data set in its standard binary version: records of label bytes followed by pixels.

    Attributes:
        name: name of the data set.
        classes: number of classes of the last label byte, >= 2.
        label_bytes: label bytes per record, >= 1.
        train: names of the training files.
        test: name of the evaluation file.
        mean: mean of each channel over the training set.
        std: standard deviation of each channel over the training set.
    """

    name: str
    classes: int
    label_bytes: int
    train: Sequence[str]
    test: str
    mean: Sequence[float]
    std: Sequence[float]

    def job(
        self, *, model: str, batch_size: int, lr: float, momentum: float, augment: bool | None, folder: str | Path
    ) -> Job:
        """Return the job that trains a model on these files."""
        folder = Path(str(folder))  # the command line parses a folder called 2024 as a number
        makers = {name: partial(maker, self.classes) for name, maker in _NETWORKS.items()}
        make_model = choose_model(model, {**makers, "softmax": partial(SoftmaxRegression, PIXELS, self.classes)})
        optimizer = sgd(lr, momentum, weight_decay=1e-4)
        if augment is None:
            augment = model != "softmax"
        with fetch_advice(self.name, folder):
            train = self._read(folder, self.train, crop_and_flip if augment else None)
            test = self._read(folder, [self.test])
        return classification(
            name=f"{self.name}-{model}",
            model=make_model,
            optimizer=optimizer,
            train=train,
            test=test,
            batch_size=batch_size,
        )

    def _read(
        self, folder: Path, names: Sequence[str], augment: Callable[[Tensor], Tensor] | None = None
    ) -> ImageDataset:
        records = torch.cat([self._records(folder / name) for name in names])
        images, labels = records[:, self.label_bytes :].unflatten(1, IMAGE_SHAPE), records[:, self.label_bytes - 1]
        return ImageDataset(images, labels.long(), self.mean, self.std, augment)

    def _records(self, path: Path) -> Tensor:
        record_bytes = self.label_bytes + PIXELS
        try:
            content = bytearray(read_bytes(path, MOST_BYTES))  # the memory of a tensor must be writable
        except (OSError, ContentError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot read '{path}': {reason}") from error
        if not content or len(content) % record_bytes:
            raise UsageError(
                f"'{path}' holds {counted(len(content), 'byte')}; expected a multiple of {record_bytes}, one record"
            )
        records = torch.frombuffer(content, dtype=torch.uint8).view(-1, record_bytes)
        largest = records[:, self.label_bytes - 1].max()
        if largest >= self.classes:
            raise UsageError(f"'{path}' holds label {largest}; expected 0 to {self.classes - 1}")
        return records


_CIFAR10 = _Files(
    name="cifar10",
    classes=10,
    label_bytes=1,
    train=[f"data_batch_{k}.bin" for k in range(1, 6)],
    test="test_batch.bin",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
_CIFAR100 = _Files(
    name="cifar100",
    classes=100,
    label_bytes=2,
    train=["train.bin"],
    test="test.bin",
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


@checked_types
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
        model: "resnet20", "resnet32", "resnet18", "resnet50", "resnet101", "resnet152", "vgg16" or "softmax".
        batch_size: samples per gradient, >= 1.
        lr: learning rate, > 0.
        momentum: momentum of SGD, in [0, 1).
        augment: whether training images are shifted and mirrored at random; None for all models but "softmax".
        folder: folder of the files of the standard binary version.

    Raises:
        UsageError: the files are missing or damaged, or there is no such model.

    Reference: He et al., "Deep Residual Learning", 2016, section 4.2, whose settings Sync-Switch
    (Li et al., ICDCS 2021) takes over.
    """
    return _CIFAR10.job(model=model, batch_size=batch_size, lr=lr, momentum=momentum, augment=augment, folder=folder)


@checked_types
def cifar100(
    model: str = "resnet50",
    batch_size: int = 128,
    lr: float = 0.1,
    momentum: float = 0.9,
    augment: bool | None = None,
    folder: str | Path = "data/cifar-100-binary",
) -> Job:
    """Return a job on CIFAR-100 with its 100 fine labels: 50,000 training images, 10,000 for evaluation.

    Samples and optimizer are those of `cifar10`.

    Args:
        model: as for `cifar10`.
        batch_size: samples per gradient, >= 1.
        lr: learning rate, > 0.
        momentum: momentum of SGD, in [0, 1).
        augment: whether training images are shifted and mirrored at random; None for all models but "softmax".
        folder: folder of the files of the standard binary version.

    Raises:
        UsageError: the files are missing or damaged, or there is no such model.

    Reference: set-up 2 of Sync-Switch (Li et al., ICDCS 2021), section VI-A.
    """
    return _CIFAR100.job(model=model, batch_size=batch_size, lr=lr, momentum=momentum, augment=augment, folder=folder)
