import gzip
import math
import struct
import zlib
from functools import partial
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.jobs.datasets.images import ImageDataset
from paceline.jobs.job import Job
from paceline.jobs.lr_options import MakeModel, choose_model, classification, fetch_advice, sgd
from paceline.jobs.models.small import DBWNet, SoftmaxRegression
from paceline.utils.argument_types import checked_types
from paceline.utils.files import ContentError, read_bytes
from paceline.utils.wording import counted

MOST_BYTES = 1 << 30
_UNSIGNED_BYTE = 8
_GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path, item_shape: tuple[int, ...]) -> Tensor:
    """Read an IDX file of unsigned bytes, plain or compressed with gzip: uint8 ``[N, *item_shape]``.

    Args:
        path: file; compression is detected from its content.
        item_shape: shape of one item, ``(28, 28)`` for MNIST's images and ``()`` for its labels.

    Raises:
        UsageError: the file is missing, is not IDX, or its items have another shape or number than its header says.
    """
    content = _content(path)
    shape = _shape(path, content, len(item_shape) + 1)
    if shape[1:] != item_shape:
        raise UsageError(f"'{path}' holds items of shape {shape[1:]}; expected {item_shape}")
    header_bytes = 4 + 4 * len(shape)
    found, expected = len(content) - header_bytes, math.prod(shape)
    if not expected or found != expected:
        raise UsageError(
            f"'{path}' holds {counted(found, 'byte')} of items; expected {expected} as its header says, and > 0"
        )
    return torch.frombuffer(content, dtype=torch.uint8, offset=header_bytes).reshape(shape)


def _content(path: Path) -> bytearray:
    try:
        content = read_bytes(path, MOST_BYTES)
        if content.startswith(_GZIP_MAGIC):
            with gzip.open(BytesIO(content)) as unpacked:
                content = unpacked.read(MOST_BYTES + 1)  # the one more tells that the rest is too long
        if len(content) > MOST_BYTES:
            raise ContentError(f"it has more than {MOST_BYTES} bytes")
        return bytearray(content)  # the memory of a tensor must be writable
    except (OSError, EOFError, zlib.error, ContentError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read '{path}': {reason}; expected an IDX file, plain or .gz") from error


def _shape(path: Path, content: bytearray, dimensions: int) -> tuple[int, ...]:
    magic = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    header_bytes = 4 + 4 * dimensions
    if content[:4] != magic:
        found = content[:4].hex() or "nothing"
        raise UsageError(f"'{path}' starts with {found}; expected {magic.hex()}, IDX with {dimensions} dimensions")
    if len(content) < header_bytes:
        raise UsageError(f"'{path}' ends in its header: {counted(len(content), 'byte')}, expected {header_bytes}")
    return struct.unpack_from(f">{dimensions}I", content, offset=4)


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
    """Return the job of DBW's MNIST experiments: 60,000 images for training, 10,000 for evaluation.

    A sample is float32 ``[1, 28, 28]``, normalised to the training set's mean 0.1307 and standard deviation
    0.3081; the optimizer is SGD, the paper's without momentum.

    Args:
        model: "dbw" (two convolutional and two fully connected layers) or "softmax".
        batch_size: samples per gradient, >= 1.
        lr: learning rate, > 0.
        momentum: momentum of SGD, in [0, 1).
        folder: folder of the four standard IDX files, plain or .gz.

    Raises:
        UsageError: the files are missing or damaged, or there is no such model.

    Reference: Xu, Neglia, Sebastianelli, "Dynamic Backup Workers for Parallel Machine Learning", 2020,
    section 4.
    """
    folder = Path(str(folder))  # the command line parses a folder called 2024 as a number
    make_model, optimizer = choose_model(model, _MODELS), sgd(lr, momentum)
    with fetch_advice("mnist", folder):
        train, test = _read(folder, "train"), _read(folder, "t10k")
    return classification(
        name=f"mnist-{model}", model=make_model, optimizer=optimizer, train=train, test=test, batch_size=batch_size
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
