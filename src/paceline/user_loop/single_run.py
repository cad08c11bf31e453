"""Run of a loop in a process that torchrun has not started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader


class SingleRun:
    """Run of one process that trains alone, with the methods of `AttachedRun`.

    Args:
        loader: DataLoader of the user.

    Attributes:
        loader: the same.
        over: whether all epochs have ended.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.over = False

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs."""
        yield from range(count)
        self.over = True

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Call `loss.backward`."""
        loss.backward(**options)

    def finish(self) -> None:
        """End the run."""
        self.over = True

    def __enter__(self) -> SingleRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()
