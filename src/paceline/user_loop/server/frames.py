"""Frames on the pipes between rank 0 and its server: a length of 8 bytes, and the content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, TypeVar

import msgspec
from torch import Tensor

from paceline.tensors import tensor_file

T = TypeVar("T")


def write_frame(stream: IO[bytes], content: bytes) -> None:
    """Write a frame, and flush the stream."""
    stream.write(_header(content))
    stream.write(content)
    stream.flush()


def frame(content: bytes) -> bytes:
    """Return a frame."""
    return _header(content) + content


def _header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "big")


def read_frame(stream: IO[bytes]) -> bytes:
    """Read a frame.

    Raises:
        EOFError: the stream ended before its end.

    >>> import io
    >>> stream = io.BytesIO()
    >>> write_frame(stream, b"content")
    >>> read_frame(io.BytesIO(stream.getvalue()))
    b'content'
    """
    header = stream.read(8)
    size = int.from_bytes(header, "big")
    content = stream.read(size) if len(header) == 8 else b""
    if len(header) < 8 or len(content) < size:
        raise EOFError("the stream ended within a frame")
    return content


def to_json(content: object) -> bytes:
    r"""Return what msgspec can encode as JSON, but with infinities and with names of files that are not UTF-8.

    >>> to_json({"caf\udce9": float("inf")})
    b'{"caf\\udce9": Infinity}'
    """
    return json.dumps(msgspec.to_builtins(content)).encode()


def from_json(content: bytes, kind: type[T]) -> T:
    """Return a value of a type from what `to_json` has returned."""
    return msgspec.convert(json.loads(content), kind)


def write_tensors(stream: IO[bytes], tensors: Mapping[str, Tensor]) -> None:
    """Write a frame of named tensors."""
    write_frame(stream, tensor_file.to_bytes(tensors))


def read_tensors(stream: IO[bytes]) -> dict[str, Tensor]:
    """Read what `write_tensors` has written.

    Raises:
        EOFError: the stream ended before its end.
    """
    return tensor_file.from_bytes(read_frame(stream))
