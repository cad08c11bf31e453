"""Loops that numba compiles: steps of an optimizer in one pass over memory, with the bits of torch's operations.

This module needs numba; `paceline.tensors.compiled_loops` decides whether it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import intrinsic

STRIP = 2048  # elements of a sum in the vectors' own precision; the sums of strips are added in double precision
VECTORS = 4  # vectors of a mean that one loop reads

# No fast-math: each operation rounds as in torch, whose multiplications and additions are fused where `fma` is called.
compiled = njit(cache=True, nogil=True, error_model="numpy")  # numpy: a division by 0 gives inf, as in torch


def _typed_fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, b, c), generate


def _typed_addition(typing_context: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments, flags=("reassoc",))

    return a(a, b), generate


fma: Any = intrinsic(_typed_fma)  # a * b + c, rounded once
add_in_lanes: Any = intrinsic(_typed_addition)  # a + b, in any order: the rounding of a sum depends on the processor


@compiled
def _lerp(mean, new, weight):  # type: ignore[no-untyped-def]
    """Return an element of `torch.lerp`."""
    small = weight < type(weight)(0.5)
    return fma(weight if small else weight - type(weight)(1), new - mean, mean if small else new)


@compiled
def _mean(vectors, weights, factor, j):  # type: ignore[no-untyped-def]
    """Return an element of the running mean of 1 to 4 vectors, times a factor; their number is known when compiled."""
    last = len(vectors) - 1
    mean = vectors[0][j]
    if last > 0:
        mean = _lerp(mean, vectors[min(1, last)][j], weights[1])
    if last > 1:
        mean = _lerp(mean, vectors[min(2, last)][j], weights[2])
    if last > 2:
        mean = _lerp(mean, vectors[min(3, last)][j], weights[3])
    return mean * factor


def _loop_of_mean(begins: bool) -> Any:
    """Return one of two loops: a mean that begins does not read its memory."""

    def move_mean(mean, vectors, weights):  # type: ignore[no-untyped-def]
        """Move a running mean.

        Args:
            mean: [n], changed in place.
            vectors: 1 to 4 vectors [n].
            weights: [4], weight of each vector in the mean up to it; the first is 1 for a mean that begins.

        Returns:
            0 if all elements of the mean are finite, else nan.
        """
        check = mean.dtype.type(0)
        last = len(vectors) - 1
        for j in range(len(mean)):
            m = vectors[0][j] if begins else _lerp(mean[j], vectors[0][j], weights[0])
            if last > 0:
                m = _lerp(m, vectors[min(1, last)][j], weights[1])
            if last > 1:
                m = _lerp(m, vectors[min(2, last)][j], weights[2])
            if last > 2:
                m = _lerp(m, vectors[min(3, last)][j], weights[3])
            mean[j] = m
            check = add_in_lanes(check, m - m)
        return check

    return compiled(move_mean)


begin_mean, move_mean = _loop_of_mean(begins=True), _loop_of_mean(begins=False)


def _loop_of_sgd(in_place: bool) -> Any:
    """Return one of two loops: a condition within a loop that writes in place would keep it from vector registers."""

    def sgd(vectors, weights, factor, parameters, new, velocity, numbers):  # type: ignore[no-untyped-def]
        """Step of SGD.

        Args:
            vectors: 1 to 4 vectors [n], whose running mean is the gradient.
            weights: [4], weight of each vector in the mean up to it, > 0.
            factor: factor on the gradient.
            parameters: [n].
            new: [n], gets the new parameters; [0] if the parameters are changed in place.
            velocity: [n], changed in place; [0] for no momentum.
            numbers: [5], -lr, momentum, 1 - dampening, weight decay, and 1 for Nesterov's momentum or 0.

        Returns:
            0 if all new parameters are finite, else nan.
        """
        check = parameters.dtype.type(0)
        rate, momentum, share, decay = numbers[0], numbers[1], numbers[2], numbers[3]
        has_momentum, is_nesterov = len(velocity) > 0, numbers[4] != 0
        for j in range(len(parameters)):
            g = _mean(vectors, weights, factor, j)
            if decay != 0:
                g = fma(parameters[j], decay, g)
            if has_momentum:
                v = fma(g, share, velocity[j] * momentum)
                velocity[j] = v
                g = fma(v, momentum, g) if is_nesterov else v
            w = fma(g, rate, parameters[j])
            if in_place:
                parameters[j] = w
            else:
                new[j] = w
            check = add_in_lanes(check, w - w)
        return check

    return compiled(sgd)


sgd, sgd_in_place = _loop_of_sgd(in_place=False), _loop_of_sgd(in_place=True)


@compiled
def adam_moments(vectors, weights, factor, parameters, mean, square, numbers):  # type: ignore[no-untyped-def]
    """Mean and mean square of the gradient in Adam.

    Args:
        vectors: 1 to 4 vectors [n], whose running mean is the gradient.
        weights: [4], weight of each vector in the mean up to it, > 0.
        factor: factor on the gradient.
        parameters: [n].
        mean: [n], mean gradient, changed in place.
        square: [n], mean square of the gradient, changed in place.
        numbers: [4], 1 - beta1, beta2, 1 - beta2, and the weight decay that is part of the gradient.
    """
    weight, beta, share, decay = numbers[0], numbers[1], numbers[2], numbers[3]
    for j in range(len(parameters)):
        g = _mean(vectors, weights, factor, j)
        if decay != 0:
            g = fma(parameters[j], decay, g)
        mean[j] = _lerp(mean[j], g, weight)
        square[j] = fma(share * g, g, square[j] * beta)


@compiled
def adam_step(parameters, new, mean, root, numbers):  # type: ignore[no-untyped-def]
    """Step of Adam or AdamW.

    Args:
        parameters: [n].
        new: [n], gets the new parameters; [0] if the parameters are changed in place.
        mean: [n], mean gradient.
        root: [n], square root of the mean square of the gradient.
        numbers: [4], minus the step size, the root of the second bias correction, epsilon, and the factor on the
            parameters.

    Returns:
        0 if all new parameters are finite, else nan.
    """
    check = parameters.dtype.type(0)
    size, correction, epsilon, decay = numbers[0], numbers[1], numbers[2], numbers[3]
    in_place = len(new) == 0
    for j in range(len(parameters)):
        w = parameters[j] * decay + size * mean[j] / (root[j] / correction + epsilon)
        if in_place:
            parameters[j] = w
        else:
            new[j] = w
        check = add_in_lanes(check, w - w)
    return check


@compiled
def squared_distance(now, then):  # type: ignore[no-untyped-def]
    """Return ||now - then||^2, of vectors [n]."""
    total = 0.0
    for start in range(0, len(now), STRIP):
        a, b = now[start : start + STRIP], then[start : start + STRIP]
        part = now.dtype.type(0)
        for j in range(len(a)):
            d = a[j] - b[j]
            part = add_in_lanes(part, d * d)
        total += part
    return total


@compiled
def squared_length(gradient, now, then, scale):  # type: ignore[no-untyped-def]
    """Return ||scale g g (now - then)||^2, of vectors [n]."""
    total = 0.0
    for start in range(0, len(now), STRIP):
        g, a, b = gradient[start : start + STRIP], now[start : start + STRIP], then[start : start + STRIP]
        part = now.dtype.type(0)
        for j in range(len(a)):
            d = (a[j] - b[j]) * scale * g[j] * g[j]
            part = add_in_lanes(part, d * d)
        total += part
    return total


@compiled
def correct(gradient, now, then, lambda_):  # type: ignore[no-untyped-def]
    """Add lambda g g (now - then) to g [n] in place, as `torch.addcmul` does; return ||g||^2 and ||now - then||^2."""
    norm, distance = 0.0, 0.0
    for start in range(0, len(now), STRIP):
        g, a, b = gradient[start : start + STRIP], now[start : start + STRIP], then[start : start + STRIP]
        of_g, of_d = now.dtype.type(0), now.dtype.type(0)
        for j in range(len(a)):
            d = a[j] - b[j]
            g_new = fma(lambda_ * g[j], d * g[j], g[j])
            g[j] = g_new
            of_g = add_in_lanes(of_g, g_new * g_new)
            of_d = add_in_lanes(of_d, d * d)
        norm += of_g
        distance += of_d
    return norm, distance


@compiled
def correct_adaptively(gradient, now, then, mean_square, numbers):  # type: ignore[no-untyped-def]
    """Adaptive correction of a gradient.

    Args:
        gradient: [n], changed in place.
        now: [n], current parameters.
        then: [n], parameters that the gradient was computed at.
        mean_square: [n], mean square of the gradients, changed in place.
        numbers: [4], decay of the mean square, 1 - decay, epsilon, lambda0.

    Returns:
        ||g||^2 of the corrected gradient, and ||now - then||^2.
    """
    decay, share, epsilon, lambda0 = numbers[0], numbers[1], numbers[2], numbers[3]
    one = now.dtype.type(1)
    norm, distance = 0.0, 0.0
    for start in range(0, len(now), STRIP):
        g, a, b = gradient[start : start + STRIP], now[start : start + STRIP], then[start : start + STRIP]
        squares = mean_square[start : start + STRIP]
        of_g, of_d = now.dtype.type(0), now.dtype.type(0)
        for j in range(len(a)):
            d = a[j] - b[j]
            square = fma(share * g[j], g[j], squares[j] * decay)
            squares[j] = square
            inverse_root = one / np.sqrt(square + epsilon)
            g_new = fma(lambda0 * (d * g[j] * g[j]), inverse_root, g[j])
            g[j] = g_new
            of_g = add_in_lanes(of_g, g_new * g_new)
            of_d = add_in_lanes(of_d, d * d)
        norm += of_g
        distance += of_d
    return norm, distance
