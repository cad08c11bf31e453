"""Loss reader: the values on which the user's loop calls `backward`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.stop import Stop
from paceline.protocols.protocol import Plan


class LossReader:
    """Reader of the losses of this thread, at `torch.autograd.backward`, which `Tensor.backward` calls.

    The values are read only when they are needed, so that a GPU is not waited for at each `backward`.

    Args:
        look: called with each scalar before its backward pass, which frees its graph.
    """

    def __init__(self, look: Callable[[Tensor], None]) -> None:
        self._look = look
        self._losses: list[Tensor] = []
        self._is_reading = True
        self._thread = threading.get_ident()
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._read  # type: ignore[assignment]  # all arguments are passed on

    @property
    def has_read(self) -> bool:
        """Whether a scalar was seen since the last call of `take`."""
        return bool(self._losses)

    def take(self) -> float | None:
        """Return the sum of the losses since the last call; None if no scalar was seen."""
        losses, self._losses = self._losses, []
        return float(sum(losses)) if losses else None

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Call `loss.backward`, and record the loss wherever that leads."""
        self._add([loss])
        self._is_reading = False  # else torch.autograd.backward would record it again
        try:
            loss.backward(**options)
        finally:
            self._is_reading = True

    def close(self) -> None:
        """Restore `torch.autograd.backward`, unless other code has replaced it since."""
        self._is_reading = False
        if torch.autograd.backward == self._read:
            torch.autograd.backward = self._backward

    def _read(self, tensors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        if self._is_reading and threading.get_ident() == self._thread:
            given = [tensors] if isinstance(tensors, Tensor) else tensors
            self._add([tensor for tensor in given if tensor.numel() == 1])
        self._backward(tensors, *args, **kwargs)

    def _add(self, losses: Sequence[Tensor]) -> None:
        for loss in losses:
            self._look(loss)
            self._losses.append(loss.detach())


def reader_of_losses(plan: Plan, stop: Stop) -> str:
    """Return which part of a run needs the losses, as text; empty if none does.

    >>> from paceline.catalogue.parser import parse_plan
    >>> reader_of_losses(parse_plan("dbw"), Stop(updates=5)), reader_of_losses(parse_plan("bsp"), Stop(loss=0.2))
    ('protocol dbw', 'stop loss=0.2')
    >>> reader_of_losses(parse_plan("bsp"), Stop(updates=5))
    ''
    """
    if any(controller.reads != "times" for phase in plan.phases for controller in phase.controllers):
        return f"protocol {plan}"
    read = [f"{name}={value:g}" for name, value in stop.given.items() if name in {"loss", "max_loss"}]
    return f"stop {','.join(read)}" if read else ""
