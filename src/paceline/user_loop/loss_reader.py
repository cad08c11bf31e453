"""Loss reader: the values on which the user's loop calls `backward`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor


class LossReader:
    """Reader of the losses of this thread, at `torch.autograd.backward`, which `Tensor.backward` calls.

    The values are read only when they are needed, so that a GPU is not waited for at each `backward`.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._thread = threading.get_ident()
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._read  # type: ignore[assignment]  # all arguments are passed on

    def take(self) -> float:
        """Return the sum of the losses since the last call; NaN if no scalar was seen."""
        losses, self._losses = self._losses, []
        return float(sum(losses)) if losses else nan

    def close(self) -> None:
        """Restore `torch.autograd.backward`, unless other code has replaced it since."""
        if torch.autograd.backward == self._read:
            torch.autograd.backward = self._backward

    def _read(self, tensors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == self._thread:
            given = [tensors] if isinstance(tensors, Tensor) else tensors
            self._losses += [tensor.detach() for tensor in given if tensor.numel() == 1]
        self._backward(tensors, *args, **kwargs)
