"""Reach of a backward pass: whether its graph comes from a forward pass of a model that is taken over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch

from paceline.jobs.loss_graph import LINEAR, OF_PENALTIES, name_of

MOST_PASSES = 1024  # forward passes that are remembered; a graph begins with its latest ones
OF_PARAMETERS = {
    *LINEAR,
    *OF_PENALTIES,
    *("Cat", "Permute", "Slice", "T", "Transpose"),
    *("Clamp", "ClampMax", "ClampMin", "Exp", "Log", "Log1P", "Reciprocal", "Relu", "Rsqrt", "Sigmoid", "Softplus"),
    *("Sqrt", "Tanh", "LinalgSvd", "LogSoftmax", "Logsumexp", "Max", "Mean", "Min", "Prod", "Softmax", "Std", "Var"),
}
REENTRANT = "CheckpointFunction"  # which hides what it computes
PRODUCTS = frozenset({"Mm", "Bmm"})

number_of_next_node: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class ForwardPasses:
    """Forward passes of the models that are taken over, found again in the graph of a backward pass.

    autograd numbers the nodes of a thread as they are made, so those of a forward pass are an interval. A backward
    pass reaches a model if its graph has a node of such an interval. It begins near its end, so few nodes are read; a
    pass that reaches no model, as of a model that each rank trains for itself, is read as a whole.

    A pass may reach parameters without such a node, through a compiled model, whose hooks are not called, or a part of
    a model. A penalty on parameters alone does so too: its gradient is the same on all ranks and no reducer sums it, so
    it does not count as reaching.
    """

    def __init__(self) -> None:
        self._intervals: deque[tuple[int, int]] = deque(maxlen=MOST_PASSES)
        self._models: WeakSet[torch.nn.Module] = (
            WeakSet()
        )  # a weak reference to a parameter would keep it from `to_empty`

    def watch(self, model: torch.nn.Module) -> None:
        """Note the forward passes of a model from now on."""
        first = 0

        def begin(*_: Any) -> None:
            nonlocal first
            if not torch.compiler.is_compiling():
                first = number_of_next_node()

        def end(*_: Any) -> None:
            if not torch.compiler.is_compiling() and (after := number_of_next_node()) > first:
                self._intervals.append((first, after))

        model.register_forward_pre_hook(begin, prepend=True)
        model.register_forward_hook(end)
        self._models.add(model)

    def are_reached_by(self, roots: Iterable[torch.Tensor]) -> bool:
        """Return whether the graph of a backward pass comes from a model.

        Args:
            roots: tensors from which the pass begins.
        """
        waiting = deque(root.grad_fn for root in roots)
        seen: set[Any] = set()
        has_parameter, is_penalty = False, True
        while waiting:
            node: Any = waiting.popleft()
            if node is None or node in seen:
                continue
            if self._is_of_forward(node._sequence_nr()) or name_of(node) == REENTRANT:
                return True
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                has_parameter = has_parameter or self._has(leaf)
            else:
                is_penalty &= _is_of_parameters(node)
            waiting.extend(child for child, _ in node.next_functions)
        return has_parameter and not is_penalty

    def _has(self, leaf: torch.Tensor) -> bool:
        return any(leaf is parameter for model in self._models for parameter in model.parameters())

    def _is_of_forward(self, number: int) -> bool:
        for first, after in reversed(self._intervals):
            if number >= first:
                return number < after
        return False


def _is_of_parameters(node: Any) -> bool:
    """Return whether a node may be one of a function of parameters alone: nothing else enters it but factors."""
    name = name_of(node)
    return name in OF_PARAMETERS or (name in PRODUCTS and all(child is not None for child, _ in node.next_functions))
