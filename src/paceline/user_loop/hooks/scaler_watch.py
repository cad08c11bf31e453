"""Watch over GradScaler: the scale of the losses, and what an overflow at one rank does to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch.amp import GradScaler

from paceline.errors import UsageError


class ScalerWatch:
    """Watch over the calls of `torch.amp.GradScaler` in this thread.

    They do what they do without the watch, but for `update` after a step that was only a part of an update: the scale
    changes once for each update.

    Args:
        optimizers: optimizers of the loop.
        on_unscaled: called after `unscale_` has divided the gradients by the scale.
        on_step: called with the index of an optimizer and the scaler's step, which it carries out and whose value it
            returns.
        keeps_scale: returns whether the latest step leaves the scale as it is.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        on_unscaled: Callable[[], None],
        on_step: Callable[[int, Callable[[], Any]], Any],
        keeps_scale: Callable[[], bool],
    ) -> None:
        self._thread: int | None = threading.get_ident()
        self._optimizers = optimizers
        self._on_unscaled = on_unscaled
        self._on_step = on_step
        self._keeps_scale = keeps_scale
        self._of_loop: GradScaler | None = None
        self._lowers_due = 0
        self._scaler: GradScaler | None = None  # used since the last step
        self._restores = [
            self._patch("scale", self._scale),
            self._patch("unscale_", self._unscale),
            self._patch("step", self._step),
            self._patch("update", self._update),
        ]

    def take_scale(self) -> float:
        """Return the factor on the losses since the last call, 1 if no scaler was used."""
        scaler, self._scaler = self._scaler, None
        return 1.0 if scaler is None else scaler.get_scale()

    def lower(self) -> None:
        """Lower the scale as `update` does after an overflow, or at the first use of a scaler that is not used yet."""
        self._lowers_due += 1
        self._lower_if_due()

    def _lower_if_due(self) -> None:
        if self._of_loop is not None and self._lowers_due:
            state = self._of_loop.state_dict()
            scale = state["scale"] * state["backoff_factor"] ** self._lowers_due
            self._of_loop.load_state_dict({**state, "scale": scale, "_growth_tracker": 0})
            self._lowers_due = 0

    def close(self) -> None:
        """End the watch, and restore the methods that no other code has replaced since."""
        self._thread = None
        for restore in self._restores:
            restore()

    def _patch(self, name: str, around: Callable[..., Any]) -> Callable[[], None]:
        """Replace a method by one that passes each call of this thread to a function; return what restores it."""
        original = getattr(GradScaler, name)

        @wraps(original)
        def watched(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            call = partial(original, scaler, *args, **kwargs)
            return around(call, scaler, *args) if threading.get_ident() == self._thread else call()

        def restore() -> None:
            if getattr(GradScaler, name) is watched:
                setattr(GradScaler, name, original)

        setattr(GradScaler, name, watched)
        return restore

    def _scale(self, call: Callable[[], Any], scaler: GradScaler, *_: Any) -> Any:
        self._scaler = scaler if scaler.is_enabled() else None
        self._of_loop = self._scaler or self._of_loop
        self._lower_if_due()
        return call()

    def _unscale(self, call: Callable[[], Any], scaler: GradScaler, *args: Any) -> Any:
        call()
        if self._index(*args) is not None:
            self._on_unscaled()

    def _step(self, call: Callable[[], Any], scaler: GradScaler, *args: Any) -> Any:
        index = self._index(*args)
        return call() if index is None else self._on_step(index, call)

    def _update(self, call: partial[Any], scaler: GradScaler, *args: Any) -> Any:
        has_given = bool(args or call.keywords)  # a scale of the user
        if scaler is not self._of_loop or has_given or not self._keeps_scale():
            return call()
        return call(new_scale=scaler.get_scale())  # else `step` would refuse the next gradient

    def _index(self, optimizer: object = None, *_: Any) -> int | None:
        """Return the index of an optimizer of the loop, None for another one."""
        indices = (index for index, own in enumerate(self._optimizers) if optimizer is None or optimizer is own)
        return next(indices, None)


def check_scaler_skips(optimizer: torch.optim.Optimizer) -> None:
    """Check that a GradScaler skips the whole step after an overflow.

    Raises:
        UsageError: the optimizer is a fused one, which skips it by itself.
    """
    if getattr(optimizer, "found_inf", None) is not None:
        raise UsageError(
            "a fused optimizer skips the steps of a GradScaler by itself, so an overflow would reach the other ranks: "
            "give the optimizer fused=False"
        )
