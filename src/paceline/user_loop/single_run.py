"""Run of a loop in a process that torchrun has not started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.user_loop.attached_run import AttachedRun
from paceline.user_loop.hooks.step_closure import StepArguments, call_closure
from paceline.user_loop.several_optimizers import parts_of
from paceline.worker.task_progress import TaskProgress


@final
class SingleRun(AttachedRun):
    """Run of one process that trains alone; each step is an update.

    Args:
        optimizer: optimizer of the user.
        loader: DataLoader of the user; None for a loop without one.
        clip_norm: largest norm of a step's gradient, None for no clipping.
    """

    ends_together = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, loader: DataLoader[Any] | None, clip_norm: float | None = None
    ) -> None:
        super().__init__(optimizer)
        if loader is not None:
            self.loader = loader
        self._hooks = [each.register_step_post_hook(self._after_step) for each in parts_of(optimizer)]
        if clip_norm is not None:
            self._hooks += [each.register_step_pre_hook(partial(_clip, clip_norm)) for each in parts_of(optimizer)]

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs."""
        yield from range(count)
        self.stopped_by = "epochs"
        self.reason = f"{count} epochs"
        self.finish()

    def steps(self, count: int | None = None) -> Iterator[int]:
        """Yield the numbers of the steps."""
        if count is None:
            raise UsageError("run.steps() of a process that trains alone has no end: give it a count, as steps(1000)")
        yield from range(count)
        self.stopped_by = "gradients"
        self.reason = f"{count} gradients"
        self.finish()

    def begin_epoch(self, epoch: int) -> None:
        """Take the batches of this epoch."""

    def minibatch(self) -> AbstractContextManager[None]:
        """Return a block without an effect: nothing interrupts a process that is alone."""
        return nullcontext()

    def pause(self) -> AbstractContextManager[None]:
        """Return a block without an effect: no other rank goes on."""
        return nullcontext()

    def stop(self) -> None:
        """End the run."""
        self.over = True

    def skip(self) -> None:
        """Drop what the loop has computed of its next step."""
        for each in parts_of(self._optimizer):
            each.zero_grad()

    def set_scheduler(self, scheduler: LRScheduler) -> None:
        """Leave the steps of the scheduler to the loop."""

    def weight(self, weight: float | Tensor) -> None:
        """Do nothing: the gradient of a process that is alone is the mean."""

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Call `loss.backward`."""
        loss.backward(**options)

    def finish(self) -> None:
        """End the run; from now on the optimizer steps as before it."""
        self.release()
        self.over = True

    def release(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.stepped = False
        has_overflown = getattr(optimizer, "found_inf", None)  # of a fused optimizer, which skips the step by itself
        if has_overflown is not None and has_overflown:
            self._progress = TaskProgress(self.update, self.workload, "skipped")
        else:
            self._progress = TaskProgress(self.update + 1, self.workload + 1, "used")
            self.stepped = True

    def __exit__(self, *exception: object) -> None:
        self.finish()


def _clip(
    clip_norm: float, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepArguments | None:
    """Clip the gradient before a step, after a closure has computed it."""
    arguments = call_closure(args, kwargs)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    _unscale(optimizer, parameters)
    torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    return arguments


def _unscale(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Divide the gradients by the scale that a GradScaler leaves to the step of a fused optimizer."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(scale.to(parameter.grad.device))
    optimizer.grad_scale = None  # type: ignore[attr-defined]  # else the step would divide again
