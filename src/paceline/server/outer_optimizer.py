"""Outer optimizer of a server whose workers make local steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.jobs.job import Job
from paceline.protocols.local_steps import LocalSteps
from paceline.protocols.outer_optimizer import DelayedNesterov, OuterOptimizer, OuterSGD


def server_job(job: Job, local_steps: LocalSteps | None) -> Job:
    """Return the job as its server trains it: with the outer optimizer, if workers make local steps.

    The schedule of the learning rate and the clipping are those of the local steps.
    """
    if local_steps is None:
        return job
    optimizer = _factory(local_steps.outer or OuterSGD(lr=1.0))
    return replace(job, optimizer=optimizer, scheduler=None, clip_norm=None, no_decay_on=())


def _factory(outer: OuterOptimizer) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    if isinstance(outer, DelayedNesterov):
        return partial(DelayedNesterovOptimizer, lr=outer.lr, momentum=outer.momentum, every=outer.every)
    has_nesterov = outer.nesterov and outer.momentum > 0
    return partial(torch.optim.SGD, lr=outer.lr, momentum=outer.momentum, nesterov=has_nesterov)


class DelayedNesterovOptimizer(torch.optim.Optimizer):
    """Optimizer of torch with the steps of `DelayedNesterov`."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float, every: int) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # has no loss
        """Step with the gradients."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, lr, every = self.state[parameter], group["lr"], group["every"]
        if not state:
            state.update(steps=0, sum=torch.zeros_like(parameter), momentum_buffer=torch.zeros_like(parameter))
        state["steps"] += 1
        state["sum"].add_(gradient)
        parameter.add_(gradient, alpha=-lr / every)
        if state["steps"] % every == 0:
            momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(state["sum"], alpha=1 / every)
            state["sum"].zero_()
            parameter.add_(momentum, alpha=-lr * group["momentum"])
