"""Loss of a backward pass: what its divisor counts, read from the graph."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch

READINGS = ("samples", "tokens", "none", "divided")  # the last: by a number that is the rank's own, or that of all
MEAN, SUM = 1, 2  # as _saved_reduction of torch's losses
MOST_NODES = 200
LINEAR = frozenset(
    {"Mul", "Div", "Neg", "ToCopy", "Clone", "Alias", "Squeeze", "Unsqueeze", "View", "Reshape", "Select", "Add", "Sub"}
)
OF_PENALTIES = frozenset({"Pow", "Abs", "Mul", "Sum", "Add", "LinalgVectorNorm", "Norm", "Stack"})


class Reading(NamedTuple):
    """What the graph of a loss shows.

    Attributes:
        weighing: one of `READINGS`, what the passes of the ranks are weighed by; None if the graph does not show it.
        divisor: number by which a sum was divided; None if that is not shown.
        name: name of the operation, for messages.
        is_sum: whether it is a sum, which may be divided.
    """

    weighing: str | None
    divisor: float | None
    name: str
    is_sum: bool = False


def read_loss(loss: torch.Tensor, batch_size: int) -> Reading:
    """Return how a loss follows from the samples of the rank's batch.

    A mean counts its samples. A mean over tokens that are not ignored, or with weights of classes, counts what it
    divides by. A sum counts nothing: its gradients add up. Of a sum over a number, only the other ranks' numbers show
    whether it is the rank's own.

    Args:
        loss: root of a backward pass, a scalar.
        batch_size: samples of the batch.
    """
    readings = list(_readings(loss, batch_size))
    kinds = {reading.weighing for reading in readings}
    if kinds == {"samples", "tokens"}:
        kinds = {"tokens"}
    if len(kinds) != 1:
        return Reading(None, None, " and ".join(sorted({reading.name for reading in readings})) or "no known reduction")
    return next(reading for reading in readings if reading.weighing in kinds)


def _readings(loss: torch.Tensor, batch_size: int) -> Iterator[Reading]:
    """Yield what each term of a sum of terms shows."""
    waiting: list[tuple[Any, int, Any]] = [(loss.grad_fn, loss.output_nr, None)]
    for _ in range(MOST_NODES):
        if not waiting:
            return
        node, output, divisor = waiting.pop()
        if node is None or _is_penalty(node):
            continue
        name = name_of(node)
        if name == "_DDPSink":  # through which DDP passes the outputs of a model in which a parameter may be unused
            waiting += [(*child, divisor) for child in node.next_functions[output : output + 1]]
        elif name in LINEAR:
            by = node._saved_other if name == "Div" and node._saved_other is not None else divisor
            waiting += [(*child, by) for child in node.next_functions]
        else:
            yield _reading(node, name, divisor, batch_size)


def _reading(node: Any, name: str, divisor: torch.Tensor | None, batch_size: int) -> Reading:
    reduction = getattr(node, "_saved_reduction", None)
    if reduction == MEAN and hasattr(node, "_saved_total_weight"):
        total = float(node._saved_total_weight)
        is_whole = node._saved_weight is None and total == node._saved_target.numel()
        return Reading("samples" if is_whole else "tokens", total, name)
    if reduction == MEAN or name == "Mean":
        return Reading("samples", None, name)
    if reduction == SUM or name == "Sum":
        if divisor is None or divisor.numel() != 1:
            return Reading("none", None, name, is_sum=True)
        count = float(divisor)
        sizes = getattr(node, "_saved_self_sym_sizes", None)
        if count == batch_size or (sizes is not None and count == prod(sizes)):
            return Reading("samples", count, name, is_sum=True)
        return Reading("divided", count, name, is_sum=True)
    return Reading(None, None, name)


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
