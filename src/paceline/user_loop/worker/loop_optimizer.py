"""Optimizer of the user's loop, as the worker's thread steps it, and what a loop needs that steps on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.errors import RunError, UsageError
from paceline.jobs.job import trainable
from paceline.tensors.kernels import await_kernels
from paceline.user_loop.data.loop_data import UserLoop
from paceline.user_loop.server.description import add_modules
from paceline.user_loop.worker.exchange import Exchange, LoopStep
from paceline.worker.gradient_source import Interrupted


class LoopOptimizer(torch.optim.Optimizer):
    """Optimizer of the user, whose steps are made in the thread of the loop.

    Args:
        optimizer: optimizer of the user, which has the parameter groups and the state.
        exchange: exchange with the loop.
        keeps_options: whether a restored state leaves the options of the loop as they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, exchange: Exchange, *, keeps_options: bool = False) -> None:
        # Not Optimizer.__init__, which would make groups and a state of its own.
        self._of_the_user = optimizer
        self._exchange = exchange
        self._keeps_options = keeps_options
        self.defaults = {"optimizer": type(optimizer).__name__, **optimizer.defaults}  # for the fingerprint of the job

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute there
        """Parameter groups of the user's optimizer."""
        return self._of_the_user.param_groups

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]  # an attribute there
        """State of the user's optimizer."""
        return self._of_the_user.state

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no loss
        """Wait until the loop has made a step.

        Raises:
            RunError: the loop has ended in the meantime, so the parameters lack this step.
        """
        await_kernels(self.param_groups[0]["params"][0].device)  # the loop may step in another stream
        try:
            self._exchange.ask(LoopStep())
        except Interrupted:
            raise RunError("the loop of this rank ended within optimizer.step()") from None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's optimizer."""
        return self._of_the_user.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the user's optimizer."""
        groups = self.param_groups
        self._of_the_user.load_state_dict(state_dict)
        if self._keeps_options:
            self._of_the_user.param_groups = groups  # the same objects, because the loop may hold them


def shared_parameters(model: nn.Module, *, with_frozen: bool = False) -> nn.Module:
    """Return a module with the parameters of a model, the same objects, and with copies of its buffers.

    Args:
        model: model of the user.
        with_frozen: whether parameters that are not trained are in the module, too.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> shared = shared_parameters(model)
    >>> all(a is b for a, b in zip(shared.parameters(), model.parameters(), strict=True))
    True
    """
    shared = nn.Module()
    modules = add_modules(shared, [name for name, _ in model.named_modules()])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or with_frozen:
            parent, _, child = name.rpartition(".")
            modules[parent].register_parameter(child, parameter)
    for name, buffer in model.named_buffers():
        parent, _, child = name.rpartition(".")
        modules[parent].register_buffer(child, buffer.detach().clone())
    return shared


def check_own_steps(loop: UserLoop) -> None:
    """Check that a loop can step its optimizer on each rank.

    Raises:
        UsageError: the optimizer needs more than a gradient or holds parameters of another model, or the model is on
            several devices.
    """
    optimizer = loop.optimizer
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "the optimizer LBFGS evaluates the loss within a step, but each step has one gradient: give an optimizer "
            "whose step() needs gradients only"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            "the optimizer SparseAdam steps with sparse gradients, but the ranks average dense ones: type bsp, or give "
            "Adam and sparse=False"
        )
    own = set(loop.model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        if not own.issuperset(group["params"]):
            raise UsageError(
                f"parameter group {number} of the optimizer holds parameters that are not in the model, which the "
                "ranks would not average: give the model whose parameters the optimizer has"
            )
    devices = sorted({str(parameter.device) for parameter in trainable(loop.model)})
    if len(devices) > 1:
        raise UsageError(
            f"the model is on {' and '.join(devices)}, but the optimizer of each rank steps it on one device: move it "
            "to one, or type bsp"
        )
