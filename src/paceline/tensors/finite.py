"""Whether tensors are finite, from their sums: a pass that reads a block anyway adds it up at next to no cost."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

import torch
from torch import Tensor


def check_sum(tensor: Tensor) -> Tensor:
    """Return a sum [] over a tensor that is finite only if all elements are; it may also overflow."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.float().sum() if real.element_size() < 4 else real.sum()


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all elements of all tensors are finite."""
    return not count_not_finite(tensors)


def count_not_finite(tensors: Iterable[Tensor]) -> int:
    """Return the number of elements that are not finite; a model may have some, as the -inf of an attention mask."""
    return sum(0 if isfinite(check_sum(each.detach())) else int((~torch.isfinite(each)).sum()) for each in tensors)
