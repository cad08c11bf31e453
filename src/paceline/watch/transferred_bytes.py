"""Bytes of gradients and versions, counted without compression."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def vector_bytes(configuration: Mapping[str, Any]) -> int | None:
    """Return the bytes of one gradient, which are those of a version; None if the configuration has no size.

    Args:
        configuration: content of ``run.json``; the dtype of the first parameter stands for all.
    """
    parameters = configuration.get("parameters")
    if not isinstance(parameters, int):
        return None
    described = configuration.get("identity", {}).get("model", {})
    first = str(next(iter(described.values()), "")) if isinstance(described, Mapping) else ""
    dtype = re.match(r"\w+", first)
    return parameters * DTYPE_BYTES.get(dtype[0] if dtype else "", 4)


def in_bytes(size_bytes: float) -> str:
    """Return a number of bytes with three significant digits.

    >>> in_bytes(2600), in_bytes(5 * 2**40)
    ('2.54 KiB', '5 TiB')
    """
    for unit in UNITS[:-1]:
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} {UNITS[-1]}"
