"""Loss of a backward pass: what its divisor counts, read from the graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from math import isclose, prod
from typing import Any, NamedTuple

import torch

READINGS = ("samples", "tokens", "none", "divided")  # the last: by a number that is the rank's own, or that of all
MEAN, SUM = 1, 2  # as _saved_reduction of torch's losses
MOST_NODES = 200
MOST_BELOW = 30  # nodes below a reduction, of which one may select values
LINEAR = frozenset(
    {
        *("Mul", "Div", "Neg", "Add", "Sub", "Rsub"),
        *("ToCopy", "Clone", "Alias", "Squeeze", "Unsqueeze", "View", "Reshape", "Select"),
    }
)
JOINING = LINEAR | {"Cat", "Expand", "Permute", "Slice", "Stack", "T", "Transpose", "Unbind"}
SELECTING = frozenset({"Index", "IndexSelect", "MaskedSelect"})  # as many values as the rank has
OF_PENALTIES = frozenset({"Pow", "Abs", "Mul", "Sum", "Add", "LinalgVectorNorm", "Norm", "Stack"})


class Factors(NamedTuple):
    """Constants that a term is multiplied by and divided by on the way to the loss."""

    divisors: tuple[float, ...] = ()
    multipliers: tuple[float, ...] = ()
    weights: tuple[torch.Tensor, ...] = ()  # one for each value


class Reading(NamedTuple):
    """What the graph of a loss shows.

    Attributes:
        weighing: one of `READINGS`, what the passes of the ranks are weighed by; None if the graph does not show it.
        divisor: number by which a sum was divided; None if that is not shown.
        name: name of the operation, for messages.
        is_sum: whether it is a sum, which may be divided.
        is_square: whether there are as many columns as samples, as where each sample is compared with all.
    """

    weighing: str | None
    divisor: float | None
    name: str
    is_sum: bool = False
    is_square: bool = False


def read_loss(loss: torch.Tensor, batch_size: int) -> Reading:
    """Return how a loss follows from the samples of the rank's batch.

    A mean counts its samples. A mean over tokens that are not ignored, over values that the rank has selected, or with
    weights of classes, counts what it divides by. A sum counts nothing: its gradients add up. Of a sum over a number,
    only the other ranks' numbers show whether it is the rank's own.

    Where means and sums follow each other, the one counts that reduces the samples. A dimension may be that of the
    samples if it is the first one and a multiple of them, or has their length.

    Args:
        loss: root of a backward pass, a scalar.
        batch_size: samples of the batch.
    """
    readings = list(_readings(loss, batch_size))
    kinds = {reading.weighing for reading in readings}
    divisors = {reading.divisor for reading in readings if reading.weighing in ("tokens", "divided")}
    if kinds == {"samples", "tokens"} or (kinds == {"tokens", "divided"} and len(divisors) == 1):
        kinds = {"tokens"}
    if len(kinds) != 1 or (kinds == {"divided"} and len(divisors) != 1):
        return Reading(None, None, " and ".join(sorted({reading.name for reading in readings})) or "no known reduction")
    found = next(reading for reading in readings if reading.weighing in kinds)
    return found._replace(is_square=any(reading.is_square for reading in readings))


def _readings(loss: torch.Tensor, batch_size: int) -> Iterator[Reading]:
    """Yield what each term of a sum of terms shows."""
    for node, factors in _terms([(loss.grad_fn, loss.output_nr, Factors())], LINEAR):
        if _is_reduction(node):
            yield from _of_reduction(node, factors, batch_size) or [_of_selection(node, factors)]
        else:
            yield Reading(None, None, name_of(node))


def _terms(begin: Iterable[tuple[Any, int, Factors]], passed: Collection[str]) -> Iterator[tuple[Any, Factors]]:
    """Yield the nodes that are reached through linear ones.

    Args:
        begin: nodes from which to begin, the number of the output, and the factors so far.
        passed: names of linear operations.
    """
    waiting = list(begin)
    for _ in range(MOST_NODES):
        if not waiting:
            return
        node, output, factors = waiting.pop()
        if node is None or _is_penalty(node):
            continue
        name = name_of(node)
        if name == "_DDPSink":  # through which DDP passes the outputs of a model in which a parameter may be unused
            waiting += [(*child, factors) for child in node.next_functions[output : output + 1]]
        elif name not in passed or _divides_by_outputs(node, name):
            yield node, factors
        elif (known := _with_factor(factors, node, name)).multipliers[-1:] != (0.0,):
            waiting += [(*child, known) for child in node.next_functions]


def _with_factor(factors: Factors, node: Any, name: str) -> Factors:
    """Return factors with the constant by which a node divides or multiplies, if there is one."""
    if name not in ("Div", "Mul") or all(child is not None for child, _ in node.next_functions):
        return factors
    value = node._saved_self if node.next_functions[0][0] is None else node._saved_other
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return factors._replace(weights=(*factors.weights, value.reciprocal() if name == "Div" else value))
    if name == "Div":
        return factors._replace(divisors=(*factors.divisors, float(value)))
    return factors._replace(multipliers=(*factors.multipliers, float(value)))


def _divides_by_outputs(node: Any, name: str) -> bool:
    """Return whether a node divides by what is not of parameters alone: then it is no mean, but a ratio of sums."""
    divisor = node.next_functions[1][0] if name == "Div" and len(node.next_functions) > 1 else None
    return divisor is not None and not _is_penalty(divisor)


def _of_reduction(node: Any, factors: Factors, batch_size: int) -> list[Reading]:
    """Return what a reduction shows, or those below it that reduce the samples; nothing if none does."""
    below = [(*child, factors) for child in node.next_functions]
    found: list[Reading] = []
    terms: list[Reading] = []
    reduces_samples = _reduces_samples(node, batch_size)
    for each, known in _terms(below, JOINING):
        if _is_reduction(each):
            found += _of_reduction(each, known, batch_size)
        elif reduces_samples:
            terms.append(_reading(node, known, batch_size))
    if found or not reduces_samples:
        return found
    is_shown = len({each[:2] for each in terms}) == 1 or any(each.weighing in (None, "tokens") for each in terms)
    # Terms with numbers of their own, as 2 in x**2 / 2 + y, show nothing by them.
    return terms if is_shown else [_reading(node, factors, batch_size)]


def _reduces_samples(node: Any, batch_size: int) -> bool:
    """Return whether a reduction is over every dimension that may be that of the samples."""
    sizes = _sizes(node)
    dims = {at for at, size in enumerate(sizes) if size == batch_size or (at == 0 and size % batch_size == 0)}
    given = [at % (1 << 64) for at in getattr(node, "_saved_dim", None) or ()]  # a negative one is without a sign
    reduced = {at - (1 << 64) + len(sizes) if at >= len(sizes) else at for at in given} or dims
    return bool(dims) and dims <= reduced


def _of_selection(node: Any, factors: Factors) -> Reading:
    """Return what a reduction shows that does not reduce all samples, but perhaps those that the rank selects."""
    name, total = name_of(node), getattr(node, "_saved_total_weight", None)
    if total is None and not _selects(node):
        return Reading(None, None, name)
    if _is_mean(node):
        return Reading("tokens", float(prod(_sizes(node)) if total is None else total), name)
    return _of_sum(name, (), factors)


def _selects(node: Any) -> bool:
    """Return whether a reduction is over selected values."""
    waiting = deque(child for child, _ in node.next_functions)
    for _ in range(MOST_BELOW):
        if not waiting:
            return False
        child = waiting.popleft()
        if child is not None:
            if name_of(child) in SELECTING:
                return True
            waiting += (each for each, _ in child.next_functions)
    return False


def _reading(node: Any, factors: Factors, batch_size: int) -> Reading:
    """Return what a reduction of the samples shows."""
    name, sizes = name_of(node), _sizes(node)
    if factors.weights and (of_weights := _of_weights(name, _is_mean(node), factors)) is not None:
        return of_weights
    if not _is_mean(node):
        return _of_sum(name, (batch_size, prod(sizes)), factors)._replace(is_square=sizes == (batch_size,) * 2)
    if not hasattr(node, "_saved_total_weight"):
        return Reading("samples", None, name, is_square=sizes == (batch_size,) * 2)
    total = float(node._saved_total_weight)
    is_whole = node._saved_weight is None and total == node._saved_target.numel()
    is_square = tuple(node._saved_self.shape) == (batch_size,) * 2
    return Reading("samples" if is_whole else "tokens", total, name, is_square=is_square)


def _of_weights(name: str, is_mean: bool, factors: Factors) -> Reading | None:
    """Return what a reduction shows by the weights of its values; None if their sum is not its divisor.

    A sum is a mean if its weights sum to 1. A mean is one over fewer values if the mean of their weights is 1, or
    divides it. It counts its values where their weights are equal.
    """
    try:
        weights = prod(torch.broadcast_tensors(*(each.detach().double() for each in factors.weights)))
    except RuntimeError:  # the values had another shape in between
        return None
    given = weights[weights != 0]
    total = float(weights.mean() if is_mean else weights.sum())
    divisors = (1.0, *factors.divisors) if is_mean else (1.0,)
    is_plain = is_mean and bool((weights == 1).all())
    if is_plain or not len(given) or not any(isclose(total, each, rel_tol=1e-3) for each in divisors):
        return None
    if not isclose(float(given.min()), float(given.max()), rel_tol=1e-3):
        return Reading(None, None, f"{name} of values with weights of the batch's own")
    return Reading("tokens", float(len(given)), name)


def _of_sum(name: str, counts: Collection[int], factors: Factors) -> Reading:
    """Return what a sum shows.

    Args:
        name: name of the operation.
        counts: numbers by which it is divided where it is a mean over samples.
        factors: factors of the sum.
    """
    divisor = prod(factors.divisors) if factors.divisors else None
    shown = [*factors.divisors, *(1 / each for each in factors.multipliers), prod(factors.divisors)]
    if any(isclose(each, count, rel_tol=1e-6) for each in shown for count in counts if count > 1):
        return Reading("samples", divisor, name, is_sum=True)
    return Reading("none" if divisor is None else "divided", divisor, name, is_sum=True)


def _is_reduction(node: Any) -> bool:
    return name_of(node) in ("Mean", "Sum") or getattr(node, "_saved_reduction", None) in (MEAN, SUM)


def _is_mean(node: Any) -> bool:
    return name_of(node) == "Mean" or getattr(node, "_saved_reduction", None) == MEAN


def _sizes(node: Any) -> tuple[int, ...]:
    """Return the shape of what a node reduces."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return tuple(node._saved_target.shape if sizes is None else sizes)


def _is_penalty(node: Any) -> bool:
    """Return whether a term depends on parameters alone, by sums and powers."""
    waiting = [node]
    for _ in range(MOST_NODES):
        if not waiting:
            return True
        child = waiting.pop()
        if child is None or type(child).__name__ == "AccumulateGrad":
            continue
        if name_of(child) not in OF_PENALTIES:
            return False
        waiting += [each for each, _ in child.next_functions]
    return False


def name_of(node: Any) -> str:
    """Return the operation of a node."""
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")
