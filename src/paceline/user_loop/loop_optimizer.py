"""Optimizer of the user's loop, as the worker's thread steps it, and the job of a rank without a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.core.events import Outcome
from paceline.errors import RunError, UsageError
from paceline.jobs.job import Job
from paceline.user_loop.description import add_modules, computed_by_the_user
from paceline.user_loop.loop_data import ATTACHED, LoopData, LoopJob, UserLoop
from paceline.user_loop.loop_replica import Exchange, LoopHost, LoopStep
from paceline.worker.replica import Interrupted, Replica


class LoopOptimizer(torch.optim.Optimizer):
    """Optimizer of the user, whose steps are made in the thread of the loop.

    Args:
        optimizer: optimizer of the user, which has the parameter groups and the state.
        exchange: exchange with the loop.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, exchange: Exchange) -> None:
        # Not Optimizer.__init__, which would make groups and a state of its own.
        self._of_the_user = optimizer
        self._exchange = exchange
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
        try:
            self._exchange.ask(LoopStep())
        except Interrupted:
            raise RunError("the loop of this rank ended within optimizer.step()") from None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's optimizer."""
        return self._of_the_user.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the user's optimizer."""
        self._of_the_user.load_state_dict(state_dict)


class SteppingHost(LoopHost):
    """Process of a rank whose loop also steps.

    Args:
        exchange: exchange with the loop.
        shared: module with the parameters of the user's model.
    """

    def __init__(self, exchange: Exchange, shared: nn.Module) -> None:
        super().__init__(exchange)
        self._shared = shared

    def replica(self, job: Job, seed: int, n: int, **settings: Any) -> Replica:
        """Return the replica that waits for the user's loop; its parameters are its own."""
        return super().replica(replace(job, model=self._shared), seed, n, **settings)

    def leave(self, reason: str, outcome: Outcome = Outcome.INTERRUPTED) -> bool:
        """Leave the run with the next sum; unless the run is elastic, it ends on all ranks."""
        self.outcome = outcome
        self.interruption = reason
        return True


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


def make_stepping_job(loop: UserLoop, shared: nn.Module, exchange: Exchange) -> Job:
    """Return the job of a rank whose gradients and steps are computed in the user's loop.

    Args:
        loop: parts of the loop.
        shared: module with the parameters of its model.
        exchange: exchange with the loop.
    """
    return LoopJob(
        name=ATTACHED,
        model=lambda: shared,
        optimizer=lambda parameters: LoopOptimizer(loop.optimizer, exchange),
        step=computed_by_the_user,
        clip_norm=loop.clip_norm,
        **LoopData.of_loader(loop.loader, loop.accumulate, loop.digest).job_settings(),
    )


def check_steps(loop: UserLoop) -> None:
    """Check that a loop can step its optimizer on each rank.

    Raises:
        UsageError: the optimizer evaluates the loss within a step, or holds parameters of another model.
    """
    optimizer = loop.optimizer
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "the optimizer LBFGS evaluates the loss within a step, but each step has one gradient: give an optimizer "
            "whose step() needs gradients only"
        )
    own = set(loop.model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        if not own.issuperset(group["params"]):
            raise UsageError(
                f"parameter group {number} of the optimizer holds parameters that are not in the model, which the "
                "ranks would not average: give the model whose parameters the optimizer has"
            )


def check_averages(loop: UserLoop) -> None:
    """Check that the ranks can average the model of a loop without a server.

    Raises:
        UsageError: the model is on a GPU.
    """
    devices = {parameter.device.type for parameter in loop.model.parameters()}
    if devices != {"cpu"}:
        raise UsageError(
            f"the model is on {' and '.join(sorted(devices - {'cpu'}))}, but without a server attach averages on the "
            "CPU only: move the model to the CPU, or give a protocol with a server, as k_sync(k=3)"
        )
