"""The parameter server: accumulate -> step -> publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isfinite, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.core.events import Apply, Compensation, Step
from paceline.core.sharding import FullVector, ShardPeers, joined
from paceline.errors import UsageError
from paceline.jobs.job import Job, trainable
from paceline.policies.compensation.base import BLOCK, Compensator, StaleGradient, squared_norm
from paceline.server.accumulator import add_up, clip, move
from paceline.server.flat_buffers import FlatBuffers, FlatLayout, bind, copy_checked
from paceline.server.optimizer import check_state_shapes, make_optimizer, scaled_part, stepping
from paceline.server.step_stats import StepMeter, squared_norm_of
from paceline.server.zero_gradients import ZeroGradientMonitor
from paceline.utils.user_code import note_place
from paceline.utils.validation import check_range


class _Taken(NamedTuple):
    """A gradient that is not added yet."""

    gradient: FlatBuffers
    samples: int
    weight: float  # samples times step scale


class ParameterServer:
    """Owns the parameters, or a slice; adds each gradient as it arrives, so that the last one costs one addition.

    With gradients g_1 ... g_k of s_1 ... s_k samples, an update steps the job's optimizer with the mean over
    the samples received, sum(s_j g_j) / sum(s_j). Floating-point buffers move by the mean of their changes,
    integer ones by the sum, boolean ones take the newest value: under BSP that is the average.

    With step scales c_j, the mean is sum(c_j s_j g_j) / sum(c_j s_j), and the step is that of this mean times
    sum(c_j s_j) / sum(s_j): the gradient is multiplied by it where the optimizer is linear in it, which gives
    sum(c_j s_j g_j) / sum(s_j), and the learning rate where it is not.

    The server of a slice has the optimizer of the whole model and gives it the gradients of its slice alone; what is
    not its own stays in its model as it was. So an optimizer has to step each tensor by its own gradient and state.

    Args:
        job: optimizer, scheduler and clipping.
        model: the server's own; its parameters are moved into flat vectors.
        layout: of that model, or of the slice that is owned.
        per_epoch: gradients of one epoch, if the data have a length.
        others: the servers of the other slices, if there are some.
        workers: that the run begins with, >= 1; schedule_unit="update" goes by them.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        layout: FlatLayout,
        per_epoch: float | None,
        others: ShardPeers | None = None,
        workers: int = 1,
    ) -> None:
        self.model = model
        self._job = job
        self._layout = layout
        self._others = others or ShardPeers()
        every = trainable(model)
        self._parameters = [every[i] for i in layout.parameters]
        self._buffers = list(model.buffers())[layout.buffers.start : layout.buffers.stop]
        self._whole = FullVector(sum(parameter.numel() for parameter in every), self._others.summed)
        self.device = every[0].device
        self._state = layout.allocate(self.device)
        for view, tensor in zip(
            [*self._state.parameters, *self._state.buffers], [*self._parameters, *self._buffers], strict=True
        ):
            view.copy_(tensor.detach())
        self._rebind_model()
        self._taken: list[_Taken] = []
        self._count = 0  # of gradients taken since the last update
        self._watch: ZeroGradientMonitor | None = None
        self._samples = 0  # in the mean
        self._weight = 0.0  # likewise
        self._memories: dict[str, dict[str, list[Tensor]]] = {}  # of compensators
        self._workload = 0
        self._scheduled = 0
        self._per_step = job.gradients_per_schedule_step(per_epoch, workers)
        self.optimizer = make_optimizer(job, every, model)
        self._meter = StepMeter(self.optimizer, self._state.flat_parameters, self._whole)
        try:
            self._scheduler = job.scheduler(self.optimizer) if job.scheduler is not None else None
        except Exception as error:
            note_place(error, f"the scheduler of job {job.name} could not be made")
            raise
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise UsageError(
                f"job {job.name}: ReduceLROnPlateau waits for a metric, which a schedule by workload does not have; "
                "give another scheduler"
            )
        if self._scheduler is not None and self._per_step is None:
            raise UsageError(f"job {job.name}: these data have no epochs to schedule by; give schedule_unit='gradient'")

    def watch_gradients(self) -> None:
        """Warn, once enough gradients were accepted, of parameters whose gradient was always zero.

        Of several processes that have the same parameters only one is to do so.
        """
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self._watch = ZeroGradientMonitor(self._job.name, [names[i] for i in self._layout.parameters])

    @property
    def state(self) -> FlatBuffers:
        """Parameters and buffers as they are, where the next update will change them."""
        return self._state

    def rebind_storage(self, place: FlatBuffers) -> None:
        """Go on with the parameters and buffers of another place of the same device, as they are there.

        Those where it was stay as they are.
        """
        self._state = place
        self._meter.parameters = place.flat_parameters
        self._rebind_model()

    @cached_property
    def _mean(self) -> FlatBuffers:
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
        gradient: FlatBuffers,
        then: FlatBuffers,
        staleness: int,
        squared_norm: float,
    ) -> tuple[tuple[Compensation, ...], bool]:
        """Let compensators act on a gradient, one after another; return what they did, and whether it is still finite.

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
        delayed = StaleGradient(
            staleness,
            self._largest_rate,
            squared_norm,
            gradient.flat_parameters,
            now,
            then.flat_parameters,
            self._whole,
        )
        done = []
        for compensator in compensators:
            memory = self._memories.setdefault(repr(compensator), {})
            factor = compensator.compensate(delayed, memory)
            if compensator.kind == "scale":
                check_range("(0, inf)", **{f"the step scale of {compensator.name}": factor})
            done.append(Compensation(compensator.formula, factor))
        is_corrected = staleness > 0 and any(by.kind == "correction" for by in compensators)
        return tuple(done), not is_corrected or self._is_finite(gradient)

    def _is_finite(self, gradient: FlatBuffers) -> bool:
        """Return whether a gradient is one, by its squared norm, which one pass tells."""
        blocks = (block for flat in gradient.flat_parameters for block in flat.split(BLOCK))
        [total] = self._whole.summed([sum(squared_norm(block) for block in blocks)])
        return isfinite(total)

    def enqueue(self, gradient: FlatBuffers, samples: int, step_scale: float = 1.0) -> None:
        """Take one gradient into the open update; it must stay as it is until `flush` or `apply`.

        Args:
            gradient: of the mean loss, with the changes of the buffers.
            samples: of its minibatch, >= 1.
            step_scale: its weight besides, > 0.
        """
        self._taken.append(_Taken(gradient, samples, samples * step_scale))
        self._count += 1

    def accumulate(self) -> None:
        """Add what was taken, but for a first one alone: adding it with the second saves copying it."""
        if self._samples or len(self._taken) > 1:
            self.flush()

    def flush(self) -> None:
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
            move(mean, gradients, weights)
        for mean, *changes in zip(self._mean.flat_buffers, *(each.flat_buffers for each in new), strict=True):
            if mean.is_floating_point() or mean.is_complex():
                move(mean, changes, shares)
            else:
                add_up(mean, changes, begin=shares[0] == 1.0)
        self._taken.clear()

    def apply(self, update: Apply) -> Step | None:
        """Make one update of what was taken and added; return the step that it was, if it is to be measured."""
        step = self.step(update)
        self.advance(update)
        return step and step._replace(next_learning_rate=self._largest_rate)

    def step(self, update: Apply) -> Step | None:
        """Let the optimizer step as `apply` does, and the schedule stay where it is."""
        mean = self._finished_mean()
        self._look(mean, update)
        lr_scale = update.lr_scale
        if update.step_scale != 1.0 and self.scaled_part == "learning rate":
            lr_scale *= update.step_scale
        elif update.step_scale != 1.0:
            for flat in mean.flat_parameters:
                flat.mul_(update.step_scale)
        with stepping(self.optimizer, lr_scale, update.momentum_limit, update.weight_decay_scale):
            step = self._step(mean, update.measure)
        for buffers, change in zip(self._state.flat_buffers, mean.flat_buffers, strict=True):
            if buffers.dtype == torch.bool:
                buffers.copy_(change)
            else:
                buffers.add_(change)
        self._samples = 0
        self._weight = 0.0
        return step

    def _look(self, mean: FlatBuffers, update: Apply) -> None:
        count, self._count = self._count, 0
        if self._watch is not None:
            self._watch.look(mean.parameters, count, update)
            if self._watch.is_over:
                self._watch = None

    def advance(self, update: Apply) -> None:
        """Let the schedule go on by the workload of an update."""
        self._workload += len(update.gradients)
        if self._scheduler is None or self._per_step is None:
            return
        due = self._workload // self._per_step
        for _ in range(due - self._scheduled):
            try:
                self._scheduler.step()
            except Exception as error:
                note_place(error, f"the scheduler of job {self._job.name} failed after {self._workload} gradients")
                raise
        self._scheduled = due

    def _step(self, mean: FlatBuffers, measure: bool) -> Step | None:
        clip_norm, learning_rate = self._job.clip_norm, self._largest_rate
        squared_norm = self._squared_norm(mean) if measure or clip_norm is not None else nan
        if measure:
            self._meter.before()
        if clip_norm is not None:
            clip(mean.flat_parameters, squared_norm**0.5, clip_norm)
        self._run_optimizer(mean)
        return self._meter.after(mean.flat_parameters, squared_norm, learning_rate) if measure else None

    def _squared_norm(self, mean: FlatBuffers) -> float:
        [total] = self._whole.summed([squared_norm_of(mean.flat_parameters)])
        return total

    def _run_optimizer(self, mean: FlatBuffers) -> None:
        for parameter, gradient in zip(self._parameters, mean.parameters, strict=True):
            parameter.grad = gradient
        before = [flat._version for flat in mean.flat_parameters]
        try:
            self.optimizer.step()
        except Exception as error:
            note_place(error, f"the optimizer of job {self._job.name} failed after {self._workload} gradients")
            raise
        if before != [flat._version for flat in mean.flat_parameters] and mean is not self._mean:
            for flat in mean.flat_parameters:  # the optimizer wrote into it, and its worker takes for zero what it
                flat.zero_()  # did not write

    def _finished_mean(self) -> FlatBuffers:
        """Return the mean of the update; a single gradient is its own mean, where it lies."""
        if len(self._taken) == 1 and not self._samples:
            [taken] = self._taken
            self._taken.clear()
            return taken.gradient
        self.flush()
        return self._mean

    def publish(self, version: FlatBuffers) -> None:
        """Copy the parameters and buffers into the storage of a version."""
        version.copy_(self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, buffers, optimizer, schedule, and what the open update is made of so far, of all slices.

        The model is whole then: it has the parameters of the other slices as they are.
        """
        own, others = self.shard_state(), self._others.states()
        for state in others:
            self._copy_into_model(state["model"])
        return {**joined([own, *others]), "model": self._tensors()}

    def gather_shards(self) -> None:
        """Let the model have the parameters and buffers of the other slices too, as they are."""
        for tensors in self._others.models():
            self._copy_into_model(tensors)

    def shard_state(self) -> dict[str, Any]:
        """Return such a state of what is owned here."""
        self.flush()
        owned = {id(tensor) for tensor in [*self._parameters, *self._buffers]}
        tensors = {name: tensor for name, tensor in self._named_tensors() if id(tensor) in owned}
        memories = {
            name: {vector: self._layout.parameter_views(flats) for vector, flats in memory.items()}
            for name, memory in self._memories.items()
        }
        return {
            "model": {name: tensor.detach() for name, tensor in tensors.items()},
            "optimizer": self._optimizer_state(self.optimizer.state_dict()),
            "scheduler": self._scheduler and self._scheduler.state_dict(),
            "workload": self._workload,
            "scheduled": self._scheduled,
            "samples": self._samples,
            "weight": self._weight,
            "memories": memories,
            "mean": {"parameters": self._mean.parameters, "buffers": self._mean.buffers} if self._samples else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state of the same job, whatever its slices were."""
        if state["model"].keys() != self._tensors().keys():
            raise ValueError("the tensors of the model have other names")
        self._others.load(state)
        self._copy_into_model(state["model"])
        self.optimizer.load_state_dict(self._optimizer_state(state["optimizer"]))
        check_state_shapes(self.optimizer)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self._workload = state["workload"]
        self._scheduled = state["scheduled"]
        self._samples = state["samples"]
        self._weight = state["weight"]
        own = slice(self._layout.parameters.start, self._layout.parameters.stop)
        for name, memory in state["memories"].items():
            self._memories[name] = {
                vector: [flat.to(self.device) for flat in self._layout.flatten_parameters(self._alike(pieces[own]))]
                for vector, pieces in memory.items()
            }
        if state["mean"] is not None:
            buffers = slice(self._layout.buffers.start, self._layout.buffers.stop)
            pieces = [*state["mean"]["parameters"][own], *state["mean"]["buffers"][buffers]]
            for view, piece in zip([*self._mean.parameters, *self._mean.buffers], pieces, strict=True):
                copy_checked(view, piece)

    def _alike(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """Refuse pieces that are not one a parameter, each of its shape."""
        for piece, parameter in zip(pieces, self._parameters, strict=True):
            if piece.shape != parameter.shape:
                raise ValueError(f"a tensor of the memory is {list(piece.shape)}, expected {list(parameter.shape)}")
        return pieces

    def _optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the optimizer without that of parameters which another slice owns."""
        owned = {id(parameter) for parameter in self._parameters}
        every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        foreign = {i for i, parameter in enumerate(every) if id(parameter) not in owned}
        return {**state, "state": {key: kept for key, kept in state["state"].items() if key not in foreign}}

    def _rebind_model(self) -> None:
        bind(self._parameters, self._state.parameters)
        bind(self._buffers, self._state.buffers)

    def _copy_into_model(self, tensors: Mapping[str, Tensor]) -> None:
        ours = self._tensors()
        for name, tensor in tensors.items():
            copy_checked(ours[name], tensor)  # in place: they live in flat vectors

    def _tensors(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by name."""
        return {name: tensor.detach() for name, tensor in self._named_tensors()}

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return all parameters and buffers; a state_dict of the model would leave some buffers out."""
        return [*self.model.named_parameters(), *self.model.named_buffers()]
