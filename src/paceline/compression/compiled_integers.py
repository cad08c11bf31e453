"""Loops that numba compiles: blocks of float32 values as integers and a scale, with the bits of torch's operations.

This module needs numba; `paceline.compression.compiled_codec` decides whether it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from paceline.compression.codecs import TINY
from paceline.core.wire import BLOCK
from paceline.tensors.compiled import compiled

HALF = BLOCK // 2
MAGNITUDE = 2**31 - 1  # bits of a float32 without its sign
ZERO, ONE, TINIEST = np.float32(0), np.float32(1), np.float32(TINY)


def _typed_rounding(typing_context: Any, a: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.rint", [arguments[0].type])
        return builder.call(function, arguments)

    return a(a), generate


def _typed_magnitude(typing_context: Any, a: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], ir.IntType(32))
        return builder.and_(bits, ir.Constant(bits.type, MAGNITUDE))

    return types.int32(types.float32), generate


def _typed_value(typing_context: Any, a: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


rounded: Any = intrinsic(_typed_rounding)  # to the nearest integer, ties to even
magnitude: Any = intrinsic(_typed_magnitude)  # bits of |a|, in the order of |a|: a maximum of floats uses no vectors
value_of: Any = intrinsic(_typed_value)  # value with these bits


@compiled
def _block(vector, i):  # type: ignore[no-untyped-def]
    return vector[i * BLOCK : (i + 1) * BLOCK]


@compiled
def _scale(largest, levels):  # type: ignore[no-untyped-def]
    """Return the scale of a block, and its inverse, from the bits of its largest absolute value."""
    value = value_of(largest)
    scale = ZERO if value < TINIEST else value / levels
    return scale, ZERO if scale == 0 else ONE / scale


@compiled
def compress(values, error, scales, integers, levels):  # type: ignore[no-untyped-def]
    """Compression with error feedback.

    Args:
        values: [256 n].
        error: [256 n], is added to the values, and gets the rest that the code leaves out.
        scales: [n], gets the scales; this and the next arguments are those of all loops.
        integers: int8 [256 n], gets the integers.
        levels: largest integer.
    """
    for i in range(len(scales)):
        v, e, q = _block(values, i), _block(error, i), _block(integers, i)
        largest = np.int32(0)
        for j in range(BLOCK):
            total = e[j] + v[j]
            e[j] = total
            largest = max(largest, magnitude(total))
        scale, inverse = _scale(largest, levels)
        scales[i] = scale
        for j in range(BLOCK):
            integer = rounded(e[j] * inverse)
            q[j] = np.int8(integer)
            e[j] -= integer * scale


@compiled
def compress_difference(values, sent, scales, integers, levels):  # type: ignore[no-untyped-def]
    """Write the code of values - sent, and add what is decoded to what was sent [256 n]."""
    for i in range(len(scales)):
        v, s, q = _block(values, i), _block(sent, i), _block(integers, i)
        largest = np.int32(0)
        for j in range(BLOCK):
            largest = max(largest, magnitude(v[j] - s[j]))
        scale, inverse = _scale(largest, levels)
        scales[i] = scale
        for j in range(BLOCK):
            integer = rounded((v[j] - s[j]) * inverse)
            q[j] = np.int8(integer)
            s[j] += integer * scale


@compiled
def decompress(values, scales, integers):  # type: ignore[no-untyped-def]
    """Decode a code into values [256 n]."""
    for i in range(len(scales)):
        v, q, scale = _block(values, i), _block(integers, i), scales[i]
        for j in range(BLOCK):
            v[j] = np.float32(q[j]) * scale


@compiled
def add_difference(values, scales, integers):  # type: ignore[no-untyped-def]
    """Add what is decoded to values [256 n]."""
    for i in range(len(scales)):
        v, q, scale = _block(values, i), _block(integers, i), scales[i]
        for j in range(BLOCK):
            v[j] += np.float32(q[j]) * scale


@compiled
def pack_pairs(integers, pairs):  # type: ignore[no-untyped-def]
    """Write integers of 4 bits [256 n] as pairs, uint8 [128 n]; the low bits are those of the first half of a block."""
    for i in range(len(integers) // BLOCK):
        q, row = _block(integers, i), pairs[i * HALF : (i + 1) * HALF]
        low, high = q[:HALF], q[HALF:]
        for j in range(HALF):
            row[j] = np.uint8(low[j] + 8 + 16 * (high[j] + 8))


@compiled
def unpack_pairs(pairs, integers):  # type: ignore[no-untyped-def]
    """Read such pairs."""
    for i in range(len(integers) // BLOCK):
        q, row = _block(integers, i), pairs[i * HALF : (i + 1) * HALF]
        low, high = q[:HALF], q[HALF:]
        for j in range(HALF):
            low[j] = np.int8(row[j] & 15) - 8
            high[j] = np.int8(row[j] >> 4) - 8
