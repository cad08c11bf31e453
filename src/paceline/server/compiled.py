"""Loops that numba compiles: steps of an optimizer in one pass over memory, with the bits of torch's operations.

This module needs numba; `paceline.server.kernels` decides whether it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

STRIP = 2048  # elements at a time; the strips of all vectors stay in the first-level cache
LANES = 32  # partial sums

# No fast-math: each operation rounds as in torch, whose multiplications and additions are fused where `fma` is called.
compiled = njit(cache=True, nogil=True, error_model="numpy")


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, b, c), generate


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """Return an address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), generate


@compiled
def _mean(addresses, weights, factor, start, mean):  # type: ignore[no-untyped-def]
    """Write the running mean of some vectors from element `start` on, times a factor, as `torch.lerp` computes it."""
    count = len(mean)
    one, half = weights.dtype.type(1), weights.dtype.type(0.5)
    first = carray(pointer(addresses[0]), start + count, mean.dtype)[start:]
    mean[:] = first
    for i in range(1, len(addresses)):
        vector = carray(pointer(addresses[i]), start + count, mean.dtype)[start:]
        if weights[i] < half:
            for j in range(count):
                mean[j] = fma(weights[i], vector[j] - mean[j], mean[j])
        else:
            for j in range(count):
                mean[j] = fma(weights[i] - one, vector[j] - mean[j], vector[j])
    if factor != one:
        for j in range(count):
            mean[j] *= factor


@compiled
def sgd(addresses, weights, factor, parameters, velocity, copy, numbers):  # type: ignore[no-untyped-def]
    """Step of SGD.

    Args:
        addresses: int64 [k], addresses of the vectors whose running mean is the gradient.
        weights: [k], weight of each vector in the mean up to it, > 0; that of the first is 1.
        factor: factor on the gradient.
        parameters: [n], changed in place.
        velocity: [n], changed in place; [0] for no momentum.
        copy: [n], gets the new parameters; [0] for no copy.
        numbers: [5], -lr, momentum, 1 - dampening, weight decay, and 1 for Nesterov's momentum or 0.
    """
    strip = np.empty(STRIP, parameters.dtype)
    for start in range(0, len(parameters), STRIP):
        w = parameters[start : start + STRIP]
        g = strip[: len(w)]
        _mean(addresses, weights, factor, start, g)
        if numbers[3] != 0:
            for j in range(len(w)):
                g[j] = fma(w[j], numbers[3], g[j])
        if len(velocity):
            v = velocity[start : start + STRIP]
            for j in range(len(w)):
                v[j] = fma(g[j], numbers[2], v[j] * numbers[1])
            if numbers[4] != 0:
                for j in range(len(w)):
                    g[j] = fma(v[j], numbers[1], g[j])
            else:
                g[:] = v
        for j in range(len(w)):
            w[j] = fma(g[j], numbers[0], w[j])
        if len(copy):
            copy[start : start + STRIP] = w


@compiled
def adam_moments(addresses, weights, factor, parameters, mean, square, numbers):  # type: ignore[no-untyped-def]
    """Mean and mean square of the gradient in Adam.

    Args:
        addresses: int64 [k], addresses of the vectors whose running mean is the gradient.
        weights: [k], weight of each vector in the mean up to it, > 0; that of the first is 1.
        factor: factor on the gradient.
        parameters: [n].
        mean: [n], mean gradient, changed in place.
        square: [n], mean square of the gradient, changed in place.
        numbers: [4], 1 - beta1, beta2, 1 - beta2, and the weight decay that is part of the gradient.
    """
    strip = np.empty(STRIP, parameters.dtype)
    one, half = numbers.dtype.type(1), numbers.dtype.type(0.5)
    for start in range(0, len(parameters), STRIP):
        w = parameters[start : start + STRIP]
        m = mean[start : start + STRIP]
        s = square[start : start + STRIP]
        g = strip[: len(w)]
        _mean(addresses, weights, factor, start, g)
        if numbers[3] != 0:
            for j in range(len(w)):
                g[j] = fma(w[j], numbers[3], g[j])
        if numbers[0] < half:
            for j in range(len(w)):
                m[j] = fma(numbers[0], g[j] - m[j], m[j])
        else:
            for j in range(len(w)):
                m[j] = fma(numbers[0] - one, g[j] - m[j], g[j])
        for j in range(len(w)):
            s[j] = fma(numbers[2] * g[j], g[j], s[j] * numbers[1])


@compiled
def adam_step(parameters, mean, root, copy, numbers):  # type: ignore[no-untyped-def]
    """Step of Adam or AdamW.

    Args:
        parameters: [n], changed in place.
        mean: [n], mean gradient.
        root: [n], square root of the mean square of the gradient.
        copy: [n], gets the new parameters; [0] for no copy.
        numbers: [4], minus the step size, the root of the second bias correction, epsilon, and the factor on the
            parameters.
    """
    one = numbers.dtype.type(1)
    for start in range(0, len(parameters), STRIP):
        w = parameters[start : start + STRIP]
        m = mean[start : start + STRIP]
        r = root[start : start + STRIP]
        if numbers[3] != one:
            for j in range(len(w)):
                w[j] *= numbers[3]
        for j in range(len(w)):
            w[j] = w[j] + numbers[0] * m[j] / (r[j] / numbers[1] + numbers[2])
        if len(copy):
            copy[start : start + STRIP] = w


@compiled
def _add_squares(values, totals):  # type: ignore[no-untyped-def]
    """Add the squares of a strip to the totals of as many lanes, in double precision."""
    whole = len(values) - len(values) % LANES
    for j in range(0, whole, LANES):
        for lane in range(LANES):
            value = np.float64(values[j + lane])
            totals[lane] += value * value
    for j in range(whole, len(values)):
        value = np.float64(values[j])
        totals[0] += value * value


@compiled
def squared_distance(now, then):  # type: ignore[no-untyped-def]
    """Return ||now - then||^2, of vectors [n], summed in double precision."""
    strip, totals = np.empty(STRIP, now.dtype), np.zeros(LANES)
    for start in range(0, len(now), STRIP):
        a, b = now[start : start + STRIP], then[start : start + STRIP]
        d = strip[: len(a)]
        for j in range(len(a)):
            d[j] = a[j] - b[j]
        _add_squares(d, totals)
    return totals.sum()


@compiled
def squared_length(gradient, now, then, scale):  # type: ignore[no-untyped-def]
    """Return ||scale g g (now - then)||^2, of vectors [n], summed in double precision."""
    strip, totals = np.empty(STRIP, now.dtype), np.zeros(LANES)
    for start in range(0, len(now), STRIP):
        g, a, b = gradient[start : start + STRIP], now[start : start + STRIP], then[start : start + STRIP]
        d = strip[: len(a)]
        for j in range(len(a)):
            d[j] = (a[j] - b[j]) * scale * g[j] * g[j]
        _add_squares(d, totals)
    return totals.sum()


@compiled
def correct(gradient, now, then, lambda_):  # type: ignore[no-untyped-def]
    """Add lambda g g (now - then) to g [n] in place, as `torch.addcmul` does; return the new ||g||^2."""
    totals = np.zeros(LANES)
    for start in range(0, len(now), STRIP):
        g, a, b = gradient[start : start + STRIP], now[start : start + STRIP], then[start : start + STRIP]
        for j in range(len(a)):
            g[j] = fma(lambda_ * g[j], (a[j] - b[j]) * g[j], g[j])
        _add_squares(g, totals)
    return totals.sum()
