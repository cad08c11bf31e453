"""Objects that the modules of a model have registered: whether they are still the same ones."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Literal

from torch import nn


class RegisteredObjects:
    """Objects that the modules of a model have registered, as they are now.

    A later look goes through all of them, once for each step of a loop: so it makes no loop in Python.

    Args:
        model: model.
        kinds: names of the registries of a module.

    >>> model = nn.Sequential(nn.Linear(1, 1))
    >>> registered = RegisteredObjects(model, "_parameters", "_modules")
    >>> registered.are_same()
    True
    >>> model[0].bias = None
    >>> registered.are_same()
    False
    """

    def __init__(self, model: nn.Module, *kinds: Literal["_parameters", "_buffers", "_modules"]) -> None:
        registries = [getattr(module, kind) for module in model.modules() for kind in kinds]
        self._empty = [each for each in registries if not each]
        self._values = [each.values() for each in registries if each]  # views, which follow their registries
        self._seen = list(chain.from_iterable(self._values))

    def are_same(self) -> bool:
        """Return whether no object was added, removed or replaced."""
        return not any(self._empty) and are_identical(list(chain.from_iterable(self._values)), self._seen)


def are_identical(ones: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two sequences have the same objects, where tensors that are equal are not the same."""
    return len(ones) == len(others) and all(map(operator.is_, ones, others))
