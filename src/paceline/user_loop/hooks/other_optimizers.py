"""Other optimizers of a user's script, which may not step the parameters of an attached model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import UsageError
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class OtherOptimizers:
    """Watch over the steps of all other optimizers in the thread of the loop.

    Args:
        own: optimizers that are attached.
        parameters: parameters of the attached model.
    """

    def __init__(self, own: Iterable[torch.optim.Optimizer], parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._checked = weakref.WeakSet(own)
        self._loop = threading.get_ident()
        self._has_warned = False
        self._hook = register_optimizer_step_pre_hook(self._on_step)

    def close(self) -> None:
        """End the watch."""
        self._hook.remove()

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Check an optimizer at its first step; warn once of one that trains another model.

        Raises:
            UsageError: it has parameters of the attached model.
        """
        if optimizer in self._checked or threading.get_ident() != self._loop:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) in self._parameters for parameter in parameters):
            raise UsageError(
                f"a second optimizer, {type(optimizer).__name__}, steps parameters of the attached model, which the "
                "next version overwrites: give attach all optimizers, as pl.attach([generator, critic], [opt_g, opt_d])"
            )
        self._checked.add(optimizer)
        if not self._has_warned and any(isinstance(parameter, nn.Parameter) for parameter in parameters):
            self._has_warned = True
            LOG.warning(
                "a second optimizer, %s, steps parameters that are not in the attached model, on each rank alone: the "
                "ranks diverge. Give attach all models and optimizers, as pl.attach([generator, critic], [opt_g, "
                "opt_d])",
                type(optimizer).__name__,
            )

    _on_step.changes_nothing = True  # type: ignore[attr-defined]  # a server's own optimizer steps as without the watch
