"""Interruptible batch: a block of the user's loop that ends between two layers when the task is interrupted."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.worker.gradient_source import Interrupted, check_between_layers


class InterruptibleBatch:
    """Block in which a model checks between its layers, forward and backward, whether its task is interrupted.

    Args:
        model: model of the user, to whose layers the first block adds hooks.
        check: function that raises `Interrupted` if the task is interrupted.
        on_interrupted: called when that has ended the block; then the code after the block runs.
    """

    def __init__(self, model: nn.Module, check: Callable[[], None], on_interrupted: Callable[[], None]) -> None:
        self._model = model
        self._check = check
        self._on_interrupted = on_interrupted
        self._is_open = False
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> None:
        if not self._hooks:
            self._hooks = check_between_layers(self._model, self._check_if_open)
        self._is_open = True

    def __exit__(self, kind: object, error: object, traceback: object) -> bool:
        self._is_open = False
        is_interrupted = isinstance(error, Interrupted)
        if is_interrupted:
            self._on_interrupted()
        return is_interrupted

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _check_if_open(self) -> None:
        if self._is_open:
            self._check()
