"""Modes of an optimizer that evaluates at other parameters than it trains, as schedule-free ones do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from paceline.errors import RunError
from paceline.user_loop.server.optimizer_state import load_named_state


class OptimizerModes:
    """Calls of `eval` and `train` of an optimizer whose state is in a copy.

    `eval` gets the state of the copy. `train` gives the parameters back as they were, to the bit: they are a version.

    Args:
        optimizer: optimizer of the user.
        whole: all optimizers of the loop as one.
        model: model of the user.
        read_state: returns the state of the copy, as of `named_state`; None if it is not at this rank.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        whole: torch.optim.Optimizer,
        model: nn.Module,
        read_state: Callable[[], Mapping[str, Tensor]] | None,
    ) -> None:
        self._optimizer = optimizer
        self._whole = whole
        self._model = model
        self._read_state = read_state
        self._version: list[Tensor] = []  # while the parameters are those of an evaluation
        kind = type(optimizer)
        self._are_there = callable(getattr(kind, "eval", None)) and callable(getattr(kind, "train", None))
        if self._are_there:
            vars(optimizer).update(eval=self._eval, train=self._train)

    def close(self) -> None:
        """Leave the calls to the class of the optimizer."""
        if self._are_there:
            for name in ("eval", "train"):
                vars(self._optimizer).pop(name, None)

    def _eval(self) -> None:
        if self._read_state is None:
            raise RunError(
                "optimizer.eval() needs the state of the optimizer, which is at rank 0 during a run with a server: "
                "evaluate there, or give cluster='torchrun(server=false)'"
            )
        if self._version:
            return
        self._version = [each.detach().clone() for each in self._model.parameters()]
        load_named_state(self._whole, self._model, self._read_state())
        type(self._optimizer).eval(self._optimizer)  # type: ignore[attr-defined]  # it has one

    @torch.no_grad()
    def _train(self) -> None:
        type(self._optimizer).train(self._optimizer)  # type: ignore[attr-defined]  # it has one
        if not self._version:
            return
        for parameter, value in zip(self._model.parameters(), self._version, strict=True):
            parameter.copy_(value)
        self._version = []
        self._whole.state.clear()
