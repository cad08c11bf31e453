"""The parameter server: accumulate -> step -> publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.checks import check
from paceline.compensation.base import Compensator, Delayed
from paceline.errors import UsageError
from paceline.events import Apply, Compensation, Step
from paceline.job import Job
from paceline.optimizers import make_optimizer, scaled_part, stepping
from paceline.step_meter import StepMeter
from paceline.vectors import Layout, Vectors, bind, trainable


class _Taken(NamedTuple):
    """A gradient that is not added yet."""

    gradient: Vectors
    samples: int
    weight: float  # samples times step scale


class ParameterServer:
    """Owns the parameters; adds each gradient as it arrives, so that the last one costs one addition.

    With gradients g_1 ... g_k of s_1 ... s_k samples, an update steps the job's optimizer with the mean over
    the samples received, sum(s_j g_j) / sum(s_j). Floating-point buffers move by the mean of their changes,
    integer ones by the sum, boolean ones take the newest value: under BSP that is the average.

    With step scales c_j, the mean is sum(c_j s_j g_j) / sum(c_j s_j), and the step is that of this mean times
    sum(c_j s_j) / sum(s_j): the gradient is multiplied by it where the optimizer is linear in it, which gives
    sum(c_j s_j g_j) / sum(s_j), and the learning rate where it is not.

    Args:
        job: optimizer, scheduler and clipping.
        model: the server's own; its parameters are moved into flat vectors.
        layout: of that model.
        per_epoch: gradients of one epoch, if the data have a length.
    """

    def __init__(self, job: Job, model: nn.Module, layout: Layout, per_epoch: float | None) -> None:
        self.model = model
        self._job = job
        self._parameters = trainable(model)
        self.device = self._parameters[0].device
        self._state = layout.allocate(self.device)
        self._layout = layout
        for view, tensor in zip(
            [*self._state.parameters, *self._state.buffers], [*self._parameters, *model.buffers()], strict=True
        ):
            view.copy_(tensor.detach())
        self._live_in_state()
        self._taken: list[_Taken] = []
        self._samples = 0  # in the mean
        self._weight = 0.0  # likewise
        self._memories: dict[str, dict[str, list[Tensor]]] = {}  # of compensators
        self._workload = 0
        self._scheduled = 0
        self._per_step = 1.0 if job.schedule_unit == "gradient" else per_epoch
        self.optimizer = make_optimizer(job, self._parameters, model)
        self._meter = StepMeter(self.optimizer, self._state.flat_parameters)
        self._scheduler = job.scheduler(self.optimizer) if job.scheduler is not None else None
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise UsageError(
                f"job {job.name}: ReduceLROnPlateau waits for a metric, which a schedule by workload does not have; "
                "give another scheduler"
            )
        if self._scheduler is not None and self._per_step is None:
            raise UsageError(f"job {job.name}: these data have no epochs to schedule by; give schedule_unit='gradient'")

    @property
    def state(self) -> Vectors:
        """Parameters and buffers as they are, where the next update will change them."""
        return self._state

    def move_to(self, place: Vectors) -> None:
        """Go on in another place of the same device, and leave the state where it was as it is."""
        place.copy_(self._state)
        self.live_in(place)

    def live_in(self, place: Vectors) -> None:
        """Go on with the parameters and buffers of another place of the same device, as they are there."""
        self._state = place
        self._meter.parameters = place.flat_parameters
        self._live_in_state()

    @cached_property
    def _mean(self) -> Vectors:
        """Of the open update; there is none where every update is one gradient."""
        return self._layout.allocate(self.device)

    @property
    def learning_rate(self) -> float:
        """The optimizer's own rate now, of its first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def _largest_rate(self) -> float:
        """That of some parameter group which moves, if any does; the first one may be frozen."""
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    @property
    def scaled_part(self) -> str:
        """What a step scale multiplies, "gradient" or "learning rate"."""
        return scaled_part(self._job, self.optimizer)

    def compensate(
        self,
        compensators: Sequence[Compensator],
        gradient: Vectors,
        then: Vectors,
        staleness: int,
        squared_norm: float,
    ) -> tuple[Compensation, ...]:
        """Let compensators act on a gradient, one after another, and return what they did.

        Args:
            compensators: that may change the gradient.
            gradient: that is about to be taken.
            then: the version that it was computed at.
            staleness: versions made since that one, >= 0.
            squared_norm: of the gradient.

        Raises:
            UsageError: a scale is no number in (0, inf).
        """
        now = self._state.flat_parameters
        delayed = Delayed(
            staleness, self._largest_rate, squared_norm, gradient.flat_parameters, now, then.flat_parameters
        )
        done = []
        for compensator in compensators:
            memory = self._memories.setdefault(repr(compensator), {})
            factor = compensator.compensate(delayed, memory)
            if compensator.kind == "scale":
                check("(0, inf)", **{f"the step scale of {compensator.name}": factor})
            done.append(Compensation(compensator.formula, factor))
        return tuple(done)

    def take(self, gradient: Vectors, samples: int, step_scale: float = 1.0) -> None:
        """Take one gradient into the open update; it must stay as it is until `let_go` or `apply`.

        Args:
            gradient: of the mean loss, with the changes of the buffers.
            samples: of its minibatch, >= 1.
            step_scale: its weight besides, > 0.
        """
        self._taken.append(_Taken(gradient, samples, samples * step_scale))

    def add(self) -> None:
        """Add what was taken, but for a first one alone: adding it with the second saves copying it."""
        if self._samples or len(self._taken) > 1:
            self.let_go()

    def let_go(self) -> None:
        """Add everything that was taken; the gradients may be overwritten then."""
        if not self._taken:
            return
        weights, shares = [], []
        for taken in self._taken:
            self._samples += taken.samples
            self._weight += taken.weight
            weights.append(taken.weight / self._weight)
            shares.append(taken.samples / self._samples)
        new = [taken.gradient for taken in self._taken]
        for mean, *gradients in zip(self._mean.flat_parameters, *(each.flat_parameters for each in new), strict=True):
            _move(mean, gradients, weights)
        for mean, *changes in zip(self._mean.flat_buffers, *(each.flat_buffers for each in new), strict=True):
            if mean.is_floating_point() or mean.is_complex():
                _move(mean, changes, shares)
            else:
                _sum(mean, changes, begin=shares[0] == 1.0)
        self._taken.clear()

    def apply(self, update: Apply) -> Step | None:
        """Make one update of what was taken and added; return the step that it was, if it is to be measured."""
        mean = self._finished_mean()
        step = None
        lr_scale = update.lr_scale
        if update.step_scale != 1.0 and self.scaled_part == "learning rate":
            lr_scale *= update.step_scale
        elif update.step_scale != 1.0:
            for flat in mean.flat_parameters:
                flat.mul_(update.step_scale)
        with stepping(self.optimizer, lr_scale, update.momentum_limit, update.weight_decay_scale):
            if update.measure:
                step = self._measured_step(mean)
            else:
                self._step(mean)
        for buffers, change in zip(self._state.flat_buffers, mean.flat_buffers, strict=True):
            if buffers.dtype == torch.bool:
                buffers.copy_(change)
            else:
                buffers.add_(change)
        self._samples = 0
        self._weight = 0.0
        self._workload += len(update.gradients)
        self._advance_schedule()
        return step and step._replace(next_learning_rate=self._largest_rate)

    def _measured_step(self, mean: Vectors) -> Step:
        learning_rate = self._largest_rate
        self._meter.before(mean.flat_parameters)
        self._step(mean)
        return self._meter.after(mean.flat_parameters, learning_rate)

    def _step(self, mean: Vectors) -> None:
        for parameter, gradient in zip(self._parameters, mean.parameters, strict=True):
            parameter.grad = gradient
        if self._job.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._job.clip_norm)
        before = [flat._version for flat in mean.flat_parameters]
        self.optimizer.step()
        if before != [flat._version for flat in mean.flat_parameters] and mean is not self._mean:
            mean.memory.zero_()  # the optimizer wrote into it, and its worker takes for zero what it did not write

    def _finished_mean(self) -> Vectors:
        """Return the mean of the update; a single gradient is its own mean, where it lies."""
        if len(self._taken) == 1 and not self._samples:
            [taken] = self._taken
            self._taken.clear()
            return taken.gradient
        self.let_go()
        return self._mean

    def publish(self, version: Vectors) -> None:
        """Copy the parameters and buffers into the storage of a version."""
        version.copy_(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, buffers, optimizer, schedule, and what the open update is made of so far."""
        self.let_go()
        return {
            "model": self._tensors(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self._scheduler and self._scheduler.state_dict(),
            "workload": self._workload,
            "scheduled": self._scheduled,
            "samples": self._samples,
            "weight": self._weight,
            "memories": self._memories,
            "mean": self._mean.memory.clone() if self._samples else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state of the same job."""
        for name, tensor in self._tensors().items():
            tensor.copy_(state["model"][name])  # in place: they live in flat vectors
        self.optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self._workload = state["workload"]
        self._scheduled = state["scheduled"]
        self._samples = state["samples"]
        self._weight = state["weight"]
        for name, memory in state["memories"].items():
            self._memories[name] = {vector: [each.to(self.device) for each in memory[vector]] for vector in memory}
        if state["mean"] is not None:
            self._mean.memory.copy_(state["mean"])

    def _live_in_state(self) -> None:
        bind(self._parameters, self._state.parameters)
        bind(list(self.model.buffers()), self._state.buffers)

    def _tensors(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by name; a state_dict of the model would leave some buffers out."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach() for name, tensor in named}

    def _advance_schedule(self) -> None:
        if self._scheduler is None or self._per_step is None:
            return
        due = int(self._workload / self._per_step)
        for _ in range(due - self._scheduled):
            self._scheduler.step()
        self._scheduled = due


def _move(mean: Tensor, new: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Move a running mean, so that nothing is left to divide at the update; the first one ever has weight 1."""
    if weights[0] == 1.0 and len(new) > 1:
        torch.lerp(new[0], new[1], weights[1], out=mean)
        new, weights = new[2:], weights[2:]
    elif weights[0] == 1.0:
        mean.copy_(new[0])
        new, weights = new[1:], weights[1:]
    for each, weight in zip(new, weights, strict=True):
        mean.lerp_(each, weight)


def _sum(total: Tensor, new: Sequence[Tensor], begin: bool) -> None:
    """Add integers; of booleans, keep the newest."""
    if total.dtype == torch.bool:
        total.copy_(new[-1])
        return
    if begin:
        total.zero_()
    for each in new:
        total.add_(each)
