"""The IDX format of the MNIST files, as described at the end of yann.lecun.com/exdb/mnist."""

import gzip
import math
import struct
import zlib
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.files import ContentError, read_bytes
from paceline.wording import counted

MOST_BYTES = 1 << 30
_UNSIGNED_BYTE = 8
_GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path, item_shape: tuple[int, ...]) -> Tensor:
    """Read an IDX file of unsigned bytes, plain or compressed with gzip: uint8 ``[N, *item_shape]``.

    Args:
        path: the file; whether it is compressed is read from its content.
        item_shape: the shape of one item, ``(28, 28)`` for MNIST's images and ``()`` for its labels.

    Raises:
        UsageError: the file is missing, is not IDX, holds items of another shape, or has another length
            than its header says.
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
                content = unpacked.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ContentError(f"it has more than {MOST_BYTES} bytes")
        return bytearray(content)
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
        raise UsageError(f"'{path}' ends in its header after {counted(len(content), 'byte')}; expected {header_bytes}")
    return struct.unpack_from(f">{dimensions}I", content, offset=4)
