"""Patches of torch that mark the parts of each DDP step; only times are read, and nothing is changed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.ddp_recording.layout import DEVICE_EVERY
from paceline.probe.collective_log import CollectiveLog
from paceline.probe.device_timer import DeviceTimer
from paceline.probe.gradient_sampler import GradientSampler
from paceline.probe.rank_files import RankFiles
from paceline.probe.step_timer import Row, StepTimer
from paceline.shares.marks import COLLECTIVES, call_at_end_of_graph

TIMED_BY_HOST = frozenset({"cpu"})  # devices for which the host waits
STEP_WITH_FINAL_BUCKETS = 2  # DDP rebuilds its buckets after the first step

Function = Callable[..., Any]


def start_probe(attempt: Path, rank: int, sample_every: int) -> None:
    """Patch torch in this rank.

    Args:
        attempt: folder of this start of the ranks.
        rank: number of the rank.
        sample_every: steps between two samples of the gradient; 0 for none.
    """
    files = RankFiles(attempt, rank, sample_every)
    if dist.is_available():
        StepProbe(files, GradientSampler(sample_every)).install()


class StepProbe:
    """Hooks of one rank and what they remember between two calls.

    Args:
        files: files of the rank.
        sampler: sampler of its gradients.
    """

    def __init__(self, files: RankFiles, sampler: GradientSampler) -> None:
        self._files = files
        self._sampler = sampler
        self._timer = StepTimer(self._add_step)
        self._device_timer: DeviceTimer | None = None  # of a model on a device
        self._models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._has_models = False
        self._sees_forward = False  # not the case where torch.compile compiles the DDP module itself
        self._is_synced: bool | None = None  # of the last forward pass
        self._is_in_backward = self._is_in_collective = False
        self._is_sampled = False
        self._has_failed = False
        self._collectives = CollectiveLog(files.add_collectives)
        self._step_hook: Any = None
        self._knows_optimizer = False
        self._patches: list[tuple[Any, str, Function, Function]] = []
        self._add_patch(dist, "destroy_process_group", self._with_destroy)
        self._add_patch(DistributedDataParallel, "__init__", self._with_init)
        self._add_patch(DistributedDataParallel, "forward", self._with_forward)
        self._add_patch(DistributedDataParallel, "_sync_buffers", self._timed)
        self._add_patch(torch.autograd, "backward", self._with_backward)
        self._add_patch(torch.amp.GradScaler, "scale", self._with_scale)
        for name in COLLECTIVES:
            if hasattr(dist, name):
                self._add_patch(dist, name, self._timed)
        self._add_patch(dist.Work, "wait", self._timed)

    def install(self) -> None:
        """Replace the functions of torch that the marks need."""
        if not self._has_models:
            self._collectives.enable()
            self._step_hook = register_optimizer_step_post_hook(self._on_optimizer_step)
        for owner, name, _, patched in self._patches:
            setattr(owner, name, patched)

    def remove(self) -> None:
        """Put the functions of torch back."""
        self._remove_step_hook()
        for owner, name, original, _ in self._patches:
            setattr(owner, name, original)

    def _add_patch(self, owner: Any, name: str, patched: Callable[[Function], Function]) -> None:
        original = getattr(owner, name)
        self._patches.append((owner, name, original, wraps(original)(patched(original))))

    def _remove_step_hook(self) -> None:
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._knows_optimizer:
            self._guard(self._describe_optimizer, optimizer)
        if dist.is_initialized() and not self._has_models:
            self._guard(self._collectives.step_ended)

    def _describe_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the first optimizer that steps; with models, the first one of a model's parameters."""
        trained = {each for model in self._models for each in model.parameters()}
        if self._has_models:
            if trained.isdisjoint(each for group in optimizer.param_groups for each in group["params"]):
                return
            self._remove_step_hook()
        self._knows_optimizer = True
        facts = _facts_of_optimizer(optimizer)
        if 0 <= facts["momentum"] < 1:
            self._files.describe(optimizer=facts)

    def _with_destroy(self, original: Function) -> Function:
        def destroy(*args: Any, **kwargs: Any) -> None:
            if not self._has_models:
                self._guard(self._collectives.read)
            original(*args, **kwargs)

        return destroy

    def _with_init(self, original: Function) -> Function:
        def init(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            self._guard(self._add_model, model)

        return init

    def _with_forward(self, original: Function) -> Function:
        def forward(model: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and torch.is_grad_enabled():
                self._is_synced = bool(model.require_backward_grad_sync)
                if not self._sees_forward:
                    self._sees_forward = True
                    self._guard(self._describe_inputs, inputs, kwargs)
                self._timer.forward_began(perf_counter_ns())
            output = original(model, *inputs, **kwargs)
            if self._device_timer is not None and self._is_synced:
                self._guard(self._device_timer.forward_began, perf_counter_ns(), model._get_ddp_logging_data())
            return output

        return forward

    def _with_backward(self, original: Function) -> Function:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_in_backward or not self._has_models:
                self._nested_backward(original, tensors, *args, **kwargs)
                return
            self._is_in_backward = True
            is_synced = self._will_sync()
            self._is_synced = None
            try:
                if is_synced:
                    self._guard(self._await_graph, tensors)
                self._timer.backward_began(perf_counter_ns())
                original(tensors, *args, **kwargs)
                self._timer.backward_ended(perf_counter_ns(), is_synced=is_synced)
            finally:
                self._is_in_backward = False
            if is_synced and (self._is_sampled or self._timer.step == STEP_WITH_FINAL_BUCKETS):
                self._guard(self._end_step)

        return backward

    def _nested_backward(self, original: Function, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a reentrant checkpoint; DDP may wait for the sums at its end."""
        done_ns: list[int] = []
        if self._is_in_backward:
            self._guard(self._sampler.expect_nested)
            self._guard(call_at_end_of_graph, _root_of(tensors), lambda: done_ns.append(perf_counter_ns()))
        original(tensors, *args, **kwargs)
        if done_ns:
            self._timer.sums_took(perf_counter_ns() - done_ns[-1])

    def _with_scale(self, original: Function) -> Function:
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if scaled is not outputs:
                self._sampler.remember_scale(scaled, scaler._scale)
            return scaled

        return scale

    def _timed(self, original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_in_collective or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            self._is_in_collective = True
            begin_ns = perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._is_in_collective = False
                self._timer.collective_took(perf_counter_ns() - begin_ns)

        return call

    def _will_sync(self) -> bool:
        if self._sees_forward:
            return bool(self._is_synced)
        return any(model.require_backward_grad_sync for model in self._models)

    def _await_graph(self, tensors: Any) -> None:
        root = _root_of(tensors)
        self._is_sampled = self._sampler.begin(self._timer.step, root)
        call_at_end_of_graph(root, self._on_graph_done)

    def _on_graph_done(self) -> None:
        self._timer.graph_done(perf_counter_ns())
        if self._is_sampled:
            self._guard(self._sampler.graph_done)

    def _end_step(self) -> None:
        if self._is_sampled:
            begin_ns = perf_counter_ns()
            self._is_sampled = False
            found = self._sampler.end()
            if found is not None:
                loss, local, whole = found
                self._files.add_gradient(self._timer.step - 1, loss, local, whole)
            self._timer.skip(perf_counter_ns() - begin_ns)
        if self._timer.step == STEP_WITH_FINAL_BUCKETS:
            self._describe_models()

    def _add_model(self, model: DistributedDataParallel) -> None:
        self._models.add(model)
        self._has_models = True
        self._knows_optimizer = False
        trained = [each for each in model.parameters() if each.requires_grad]
        self._sampler.watch(trained, model.gradient_as_bucket_view)
        self._files.open()
        if trained[0].device.type not in TIMED_BY_HOST:
            model._set_ddp_runtime_logging_sample_rate(DEVICE_EVERY)
            self._device_timer = DeviceTimer(self._files.add_step)
            self._files.describe(steps_per_row=DEVICE_EVERY)
        self._describe_models()

    def _add_step(self, row: Row) -> None:
        if self._device_timer is None:
            self._files.add_step(row)

    def _describe_models(self) -> None:
        models = [_facts_of(model) for model in self._models]
        self._files.describe(
            models=models, backend=dist.get_backend(), world_size=dist.get_world_size(), torch=torch.__version__
        )

    def _describe_inputs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes = (each.shape[0] for each in (*inputs, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim())
        self._files.describe(batch_size=next(sizes, None))

    def _guard(self, function: Function, *args: Any) -> None:
        """Run a part of the probe whose failure may not reach the script."""
        try:
            function(*args)
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                text = f"paceline: this rank is not fully recorded: {type(error).__name__}: {error}"
                print(text, file=sys.stderr)


def _facts_of(model: DistributedDataParallel) -> dict[str, Any]:
    trained = [each for each in model.parameters() if each.requires_grad]
    logged = model._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
    return {
        "class": type(model.module).__name__,
        "device": str(trained[0].device),
        "tensors": len(trained),
        "parameters": sum(each.numel() for each in trained),
        "payload_bytes": sum(each.numel() * each.element_size() for each in trained),
        "bucket_bytes": [int(each) for each in str(sizes).split(",") if each.strip().isdigit()],
        "static_graph": bool(model.static_graph),
    }


def _facts_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = optimizer.param_groups
    is_adaptive = any("betas" in group for group in groups)
    momenta = [group["betas"][0] if "betas" in group else group.get("momentum", 0.0) for group in groups]
    return {"name": type(optimizer).__name__, "momentum": float(max(momenta)), "is_adaptive": is_adaptive}


def _root_of(tensors: Any) -> torch.Tensor:
    """Return the first tensor of a backward pass that has a graph."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    root: torch.Tensor = next(each for each in tensors if each.requires_grad)
    return root
