from functools import partial
from pathlib import Path

from torch.nn import functional as F

from paceline.argument_types import checked_types
from paceline.errors import UsageError
from paceline.job import Job
from paceline.jobs.common import MakeModel, choose_model, fetch_advice, sgd
from paceline.jobs.idx import read_idx
from paceline.jobs.images import ImageDataset
from paceline.jobs.models import DBWNet, SoftmaxRegression

CLASSES = 10
_MODELS: dict[str, MakeModel] = {"dbw": DBWNet, "softmax": partial(SoftmaxRegression, 28 * 28, CLASSES)}


@checked_types
def mnist(
    model: str = "dbw",
    batch_size: int = 500,
    lr: float = 0.08,
    momentum: float = 0.0,
    folder: str | Path = "data/mnist",
) -> Job:
    """Return the job of DBW's MNIST experiments: 60,000 training images, 10,000 for evaluation.

    A sample is float32 ``[1, 28, 28]``, normalised to the training set's mean 0.1307 and standard deviation
    0.3081; the optimizer is SGD, the paper's without momentum.

    Args:
        model: "dbw" (two convolutional and two fully connected layers) or "softmax".
        batch_size: samples a gradient.
        lr: learning rate, > 0.
        momentum: of SGD, in [0, 1).
        folder: where the four standard IDX files are, plain or .gz.

    Raises:
        UsageError: the files are missing or damaged, or there is no such model.

    Reference: Xu, Neglia, Sebastianelli, "Dynamic Backup Workers for Parallel Machine Learning", 2020,
    section 4.
    """
    folder = Path(str(folder))  # the command line reads a folder called 2024 as a number
    make_model, optimizer = choose_model(model, _MODELS), sgd(lr, momentum)
    with fetch_advice("mnist", folder):
        train, test = _read(folder, "train"), _read(folder, "t10k")
    return Job(
        name=f"mnist-{model}",
        model=make_model,
        optimizer=optimizer,
        data=train,
        batch_size=batch_size,
        loss=F.cross_entropy,
        eval_data=test,
    )


def _read(folder: Path, split: str) -> ImageDataset:
    images = read_idx(_find(folder, f"{split}-images-idx3-ubyte"), item_shape=(28, 28))
    labels_path = _find(folder, f"{split}-labels-idx1-ubyte")
    labels = read_idx(labels_path, item_shape=())
    if labels.max() >= CLASSES:
        raise UsageError(f"'{labels_path}' holds label {labels.max()}; expected 0 to {CLASSES - 1}")
    return ImageDataset(images[:, None], labels.long(), mean=[0.1307], std=[0.3081])


def _find(folder: Path, name: str) -> Path:
    plain, compressed = folder / name, folder / f"{name}.gz"
    return plain if plain.exists() else compressed
