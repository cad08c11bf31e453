"""Interruptible batch: a block of the user's loop that ends between two layers when the task is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from paceline.worker.replica import Interrupted, check_between_layers


class InterruptibleBatch:
    """Blocks in which a model checks between its layers, forward and backward, whether its task is interrupted.

    Args:
        model: model of the user, to whose layers the first block adds hooks.
        check: function that raises `Interrupted` if the task is interrupted.
    """

    def __init__(self, model: nn.Module, check: Callable[[], None]) -> None:
        self._model = model
        self._check = check
        self._is_open = False
        self._has_hooks = False

    @contextmanager
    def block(self, on_interrupted: Callable[[], None]) -> Iterator[None]:
        """Return a block that an interrupt ends; then a function is called, and the code after the block runs."""
        if not self._has_hooks:
            check_between_layers(self._model, self._check_if_open)
            self._has_hooks = True
        self._is_open = True
        try:
            yield
        except Interrupted:
            on_interrupted()
        finally:
            self._is_open = False

    def _check_if_open(self) -> None:
        if self._is_open:
            self._check()
