"""The parameter server: accumulate -> step -> publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.events import Apply, Compensation, Step
from paceline.core.sharding import FullVector, NoPeers, ShardPeers, merge_shards
from paceline.jobs.job import Job, trainable
from paceline.policies.compensation.base import Compensator, apply_compensators
from paceline.server.accumulator import GradientAccumulator, MeanGradient
from paceline.server.optimizer import load_checked, make_optimizer, scaled_part, stepping
from paceline.server.optimizer_step import OptimizerStep, max_learning_rate
from paceline.server.workload_scheduler import WorkloadScheduler
from paceline.server.zero_gradients import ZeroGradientMonitor
from paceline.tensors.compiled_arithmetic import stale_arithmetic
from paceline.tensors.finite import count_not_finite
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout, bind, copy_checked, is_a_mean
from paceline.tensors.stale_vectors import StaleVectors
from paceline.utils.user_code import at_place


class ParameterServer:
    """Owner of the parameters, or of one shard; adds each gradient as early as the order of workers allows.

    An update steps the job's optimizer with the mean of the accumulated gradients, see `GradientAccumulator`. With
    gradients g_1 ... g_k of s_1 ... s_k samples and step scales c_1 ... c_k, the step is that of
    sum(c_j s_j g_j) / sum(c_j s_j), times sum(c_j s_j) / sum(s_j). Where the optimizer is linear in the gradient, that
    factor multiplies the gradient, which gives sum(c_j s_j g_j) / sum(s_j); elsewhere it multiplies the learning rate.

    The server of a shard has the optimizer of the whole model, but passes it only the gradients of its shard; the rest
    of its model stays as it was. So an optimizer must step each tensor by that tensor's own gradient and state.

    Args:
        job: job with optimizer, scheduler and clipping.
        model: the server's own model; its parameters are moved into flat buffers.
        layout: layout of that model, or of the shard.
        per_epoch: gradients of one epoch, None for data without length.
        peers: servers of the other shards, None if this server owns all.
        workers: workers at the start of the run, >= 1; the unit of schedule_unit="update".

    Attributes:
        state: storage of the current parameters and buffers: that of the newest version, if there are versions.
        scheduler: schedule of the learning rate.
        on_mean: callback with the mean gradient of each update before its step.
        optimizer_lock: context of each step, in which no other thread may read the state of the optimizer.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        layout: FlatLayout,
        per_epoch: float | None,
        peers: ShardPeers | None = None,
        workers: int = 1,
    ) -> None:
        self.model = model
        self._job = job
        self._layout = layout
        self._peers = peers or NoPeers()
        every = trainable(model)
        self._parameters = [every[i] for i in layout.parameters]
        self._buffers = list(model.buffers())[layout.buffers.start : layout.buffers.stop]
        self._vector = FullVector(sum(parameter.numel() for parameter in every), self._peers.summed)
        self.device = every[0].device
        self.state = layout.allocate(self.device)
        for view, tensor in zip(
            [*self.state.parameters, *self.state.buffers], [*self._parameters, *self._buffers], strict=True
        ):
            view.copy_(tensor.detach())
        self._accumulator = GradientAccumulator(layout, self.device)
        self._monitor: ZeroGradientMonitor | None = None
        self.on_mean: Callable[[FlatBuffers, Apply], None] | None = None
        self.optimizer_lock: AbstractContextManager[object] = nullcontext()
        self._not_finite = ""
        self._infinite = count_not_finite(self.state.flat_buffers)  # elements from the beginning
        self._memories: dict[str, dict[str, list[Tensor]]] = {}  # of compensators and outer optimizers
        self._rebind_model()
        self.optimizer = make_optimizer(job, every, model)
        self._optimizer_step = OptimizerStep(self.optimizer, self._parameters, layout, self._vector, job.clip_norm)
        self.scheduler = WorkloadScheduler(job, self.optimizer, per_epoch, workers)

    def watch_gradients(self) -> None:
        """Warn, once enough gradients were accepted, of parameters whose gradient was always zero.

        Of several processes with the same parameters, only one should call this.
        """
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self._monitor = ZeroGradientMonitor(self._job.name, [names[i] for i in self._layout.parameters])

    def rebind_storage(self, storage: FlatBuffers) -> None:
        """Continue with the parameters and buffers in another storage on the same device; the old one is unchanged."""
        self.state = storage
        self._rebind_model()

    @property
    def learning_rate(self) -> float:
        """Current learning rate of the optimizer's first parameter group, without scales."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def not_finite(self) -> str:
        """Why the parameters or buffers of a shard are not finite; empty while all are."""
        return self._not_finite or self._peers.not_finite

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
        """Apply compensators to a gradient, in order; return what they did, and whether the gradient is still finite.

        Args:
            compensators: compensators, which may change the gradient.
            gradient: gradient that is about to be enqueued.
            then: version at which it was computed.
            staleness: updates made since that version, >= 0.
            squared_norm: squared norm of the gradient, >= 0.

        Raises:
            UsageError: a step scale is not in (0, inf).
        """
        now = self.state.flat_parameters
        delayed = StaleVectors(
            staleness=staleness,
            learning_rate=max_learning_rate(self.optimizer),
            squared_norm=squared_norm,
            gradient=gradient.flat_parameters,
            now=now,
            then=then.flat_parameters,
            whole=self._vector,
            arithmetic=stale_arithmetic(now),
        )
        factors = apply_compensators(compensators, delayed, self.memory)
        done = [Compensation(by.formula, factor) for by, factor in zip(compensators, factors, strict=True)]
        is_corrected = staleness > 0 and any(by.kind == "correction" for by in compensators)
        return tuple(done), not is_corrected or delayed.is_finite

    def memory(self, part: object) -> dict[str, list[Tensor]]:
        """Return the flat vectors of a compensator or an outer optimizer, which it may change; they are saved."""
        return self._memories.setdefault(repr(part), {})

    def enqueue(self, gradient: FlatBuffers, weight: float, step_scale: float = 1.0, worker: int = 0) -> None:
        """Queue one gradient for the open update; it must not change until `flush` or `apply`.

        Args:
            gradient: gradient of the mean loss, with the changes of the buffers.
            weight: what it counts in the mean, as its samples, > 0.
            step_scale: additional weight, > 0.
            worker: number of the worker, >= 0.
        """
        self._accumulator.enqueue(gradient, weight, step_scale, worker)

    def drop_gradients(self) -> None:
        """Drop the gradients of the open update."""
        self._accumulator.clear()

    @property
    def has_queued(self) -> bool:
        """Whether gradients are queued."""
        return self._accumulator.has_queued

    def accumulate(self, below: float = inf) -> None:
        """Add queued gradients of workers below a number to the mean; a lone first one stays queued."""
        self._accumulator.accumulate(below)

    def flush(self, worker: int | None = None) -> None:
        """Add all queued gradients to the mean, if one of this worker is among them; then they may be overwritten."""
        self._accumulator.flush(worker)

    def apply(self, update: Apply, version: FlatBuffers | None = None) -> Step | None:
        """Make one update of the enqueued gradients; return the measured step, None if `update.measure` is false.

        Args:
            update: update to make.
            version: storage of the new version, which the server continues with; None for an update in place.
        """
        if update.is_skipped:
            self.drop_gradients()
            self.publish(self.state if version is None else version)
        step = None if update.is_skipped else self.step(update, version)
        self.advance_schedule(update.workload)
        return step and step._replace(next_learning_rate=max_learning_rate(self.optimizer))

    def advance_schedule(self, workload: int) -> None:
        """Advance the schedule past an update of this number of gradients whose step is not made here."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns of the scheduler's first step
        self.scheduler.advance(workload)

    def step(self, update: Apply, version: FlatBuffers | None = None) -> Step | None:
        """Step the optimizer as `apply` does, without advancing the schedule."""
        new = self.state if version is None else version
        mean = self._accumulator.finish()
        if self.on_mean is not None:
            self.on_mean(mean.whole, update)
        if self._monitor is not None:
            self._monitor.observe(mean.whole.parameters, mean.count, update)
            self._monitor = None if self._monitor.is_over else self._monitor
        lr_scale, factor = update.lr_scale, 1.0
        if update.step_scale != 1.0 and self.scaled_part == "learning rate":
            lr_scale *= update.step_scale
        else:
            factor = update.step_scale
        failure = f"the optimizer of job {self._job.name} failed after {self.scheduler.workload} gradients"
        changed = stepping(
            self.optimizer,
            lr_scale,
            momentum_limit=update.momentum_limit,
            weight_decay_scale=update.weight_decay_scale,
            momentum_power=update.momentum_power,
        )
        with at_place(failure), self.optimizer_lock, changed:
            step = self._optimizer_step.make(mean, self.state, new, factor=factor, measure=update.measure)
        for old, change, moved in zip(self.state.flat_buffers, mean.flat_buffers, new.flat_buffers, strict=True):
            if is_a_mean(old):
                torch.add(old, change, out=moved)
            else:
                moved.copy_(change)
        are_finite = self._optimizer_step.is_finite and count_not_finite(new.flat_buffers) <= self._infinite
        if not self._not_finite and not are_finite:
            self._not_finite = _why_not_finite(update, mean)
        if new is not self.state:
            self.state = new
            bind(self._buffers, new.buffers)
        return step

    def publish(self, version: FlatBuffers) -> None:
        """Copy the parameters and buffers into the storage of a version, and continue with that storage."""
        if version is not self.state:
            version.copy_(self.state)
            self.rebind_storage(version)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, buffers, optimizer, schedule and the accumulated gradients of all shards.

        The parameters and buffers of the other shards are copied into this server's model.
        """
        own, others = self.shard_state(), self._peers.gather("state")
        for state in others:
            self._copy_into_model(state["model"])
        return {**merge_shards([own, *others]), "model": self._tensors()}

    def gather_shards(self) -> None:
        """Copy the current parameters and buffers of the other shards into this server's model."""
        for tensors in self._peers.gather("model"):
            self._copy_into_model(tensors)

    def shard_state(self) -> dict[str, Any]:
        """Return the state of this shard, as in `state_dict`."""
        owned = {id(tensor) for tensor in [*self._parameters, *self._buffers]}
        memories = {
            name: {vector: self._layout.parameter_views(flats) for vector, flats in memory.items()}
            for name, memory in self._memories.items()
        }
        return {
            "model": {name: tensor.detach() for name, tensor in self._named_tensors() if id(tensor) in owned},
            "optimizer": self._optimizer_state(self.optimizer.state_dict()),
            **self.scheduler.state_dict(),
            **self._accumulator.state_dict(),
            "memories": memories,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same job, saved with any number of shards.

        Raises:
            ValueError: a tensor has another name, shape or dtype than here.
        """
        if state["model"].keys() != self._tensors().keys():
            raise ValueError("the tensors of the model have other names")
        self._peers.load(state)
        self._copy_into_model(state["model"])
        load_checked(self.optimizer, self._optimizer_state(state["optimizer"]))
        self.scheduler.load_state_dict(state)
        own = slice(self._layout.parameters.start, self._layout.parameters.stop)
        for name, memory in state["memories"].items():
            self._memories[name] = {
                vector: [flat.to(self.device) for flat in self._layout.flatten_parameters(self._checked(views[own]))]
                for vector, views in memory.items()
            }
        self._accumulator.load_state_dict(state)

    def _checked(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors of a compensator's memory, one per parameter, or reject one of another shape."""
        for tensor, parameter in zip(tensors, self._parameters, strict=True):
            if tensor.shape != parameter.shape:
                raise ValueError(f"a tensor of the memory is {list(tensor.shape)}, expected {list(parameter.shape)}")
        return tensors

    def _optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's state without the parameters of other shards."""
        owned = {id(parameter) for parameter in self._parameters}
        every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        foreign = {i for i, parameter in enumerate(every) if id(parameter) not in owned}
        return {**state, "state": {key: value for key, value in state["state"].items() if key not in foreign}}

    def _rebind_model(self) -> None:
        bind(self._parameters, self.state.parameters)
        bind(self._buffers, self.state.buffers)

    def _copy_into_model(self, tensors: Mapping[str, Tensor]) -> None:
        ours = self._tensors()
        for name, tensor in tensors.items():
            copy_checked(ours[name], tensor)  # in place: they are views of flat buffers

    def _tensors(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by name."""
        return {name: tensor.detach() for name, tensor in self._named_tensors()}

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return all parameters and buffers; a state_dict of the model leaves out non-persistent buffers."""
        return [*self.model.named_parameters(), *self.model.named_buffers()]


def _why_not_finite(update: Apply, mean: MeanGradient) -> str:
    """Return why an update has made parameters or buffers that are not finite."""
    worker = mean.worker_not_finite()
    if worker is None:
        cause = "though its gradients are; lower the learning rate or clip gradients (clip_norm=)"
    else:
        cause = f"because the gradient of worker {worker} is not, which was sent as finite"
    return f"the parameters of update {update.version} are not finite, {cause}"
