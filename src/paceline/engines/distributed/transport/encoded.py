"""Values that stay encoded within a message until their receiver knows how large they may be.

Lists and mappings take up to 70 times their bytes once decoded, so a message that has one of any length could fill the
memory of its receiver.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Any

import msgspec
from msgspec import Meta


def encoded(value: Any) -> bytes:
    """Return a value as it is sent."""
    return msgspec.msgpack.encode(value)


def decoded(content: bytes, kind: Any, what: str, most_bytes: float = inf) -> Any:
    """Return the value that another process has sent.

    Args:
        content: encoded value.
        kind: type of the value, with the bounds that the receiver knows.
        what: what it is, for the error.
        most_bytes: bytes that an honest value has at most, where the type does not bound it.

    Raises:
        ValueError: it is none of this kind, or too large.

    >>> decoded(encoded([1, 2]), at_most(list[int], 2), "numbers")
    [1, 2]
    """
    if len(content) > most_bytes:
        raise ValueError(f"it sent wrong {what}: {len(content)} bytes, expected at most {most_bytes}")
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it sent wrong {what}: {error}") from error


def at_most(kind: Any, count: int) -> Any:
    """Return the type of a list or mapping of at most this many items."""
    return Annotated[kind, Meta(max_length=count)]
