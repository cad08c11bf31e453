"""Patches of torch that give a balancer its marks, from the first model of a script on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from paceline.balance.balancer import Balancer
from paceline.balance.settings import BalanceSettings
from paceline.utils.after_import import call_after_import

Function = Callable[..., Any]
FSDP2 = "torch.distributed.fsdp._fully_shard._fully_shard"


class Patches:
    """Functions of torch that are replaced in this rank.

    Args:
        settings: settings of the shares.
    """

    def __init__(self, settings: BalanceSettings) -> None:
        self._settings = settings
        self.balancer: Balancer | None = None
        self._thread = threading.get_ident()
        self._is_in_backward = False
        self._is_synced = True
        self._loaders: WeakKeyDictionary[Any, ref[DataLoader[Any]]] = WeakKeyDictionary()

    def install(self) -> None:
        """Wait for the first model that is trained by several ranks; nothing else is replaced before."""
        _replace(DistributedDataParallel, "__init__", self._with_init)
        call_after_import(FSDP2, self._await_fully_shard)

    def _await_fully_shard(self) -> None:
        import sys

        _replace(sys.modules[FSDP2], "fully_shard", self._with_fully_shard)

    def _take_over(self, model: torch.nn.Module) -> None:
        if self.balancer is not None or dist.get_world_size() == 1:
            return
        device = next(model.parameters()).device
        self.balancer = Balancer(self._settings, f"{type(model).__name__}", device)
        index_sampler = DataLoader._index_sampler.fget  # type: ignore[attr-defined]
        balancer = self.balancer
        DataLoader._index_sampler = property(  # type: ignore[misc,assignment]
            lambda loader: balancer.sampler_of(loader, index_sampler(loader))
        )
        _replace(_BaseDataLoaderIter, "__init__", self._with_iterator)
        _replace(_BaseDataLoaderIter, "__next__", self._with_next)
        _replace(torch.autograd, "backward", self._with_backward)

    def _with_init(self, original: Function) -> Function:
        def init(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            self._take_over(model.module)
            model.register_forward_pre_hook(self._before_forward)

        return init

    def _with_fully_shard(self, original: Function) -> Function:
        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            sharded = original(module, *args, **kwargs)
            for each in module if isinstance(module, (list, tuple)) else [module]:
                self._take_over(each)
                self._leave_out_gathers(each)
            return sharded

        return fully_shard

    def _before_forward(self, model: DistributedDataParallel, inputs: Any) -> None:
        if self.balancer is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._is_synced = bool(model.require_backward_grad_sync)
            self.balancer.stopwatch.start()

    def _leave_out_gathers(self, module: torch.nn.Module) -> None:
        """Stop the time while FSDP gathers the parameters of a module, and while it frees them."""
        if self.balancer is None:
            return
        stopwatch = self.balancer.stopwatch

        def stop(*_: Any) -> None:
            stopwatch.stop()

        def start(*_: Any) -> None:
            if torch.is_grad_enabled():
                stopwatch.start()

        module.register_forward_pre_hook(stop, prepend=True)
        module.register_forward_pre_hook(start)
        module.register_forward_hook(stop, prepend=True)
        module.register_forward_hook(start)

    def _with_iterator(self, original: Function) -> Function:
        def init(iterator: Any, loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            original(iterator, loader, *args, **kwargs)
            self._loaders[iterator] = ref(loader)

        return init

    def _with_next(self, original: Function) -> Function:
        def next_batch(iterator: Any) -> Any:
            if self.balancer is None or threading.get_ident() != self._thread:
                return original(iterator)
            self.balancer.stopwatch.restart()
            batch = original(iterator)
            loader = self._loaders.get(iterator)
            self.balancer.handed_out(loader() if loader is not None else None, iterator._index_sampler)
            return batch

        return next_batch

    def _with_backward(self, original: Function) -> Function:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if self.balancer is None or self._is_in_backward or threading.get_ident() != self._thread:
                original(tensors, grad_tensors, *args, **kwargs)
                return
            self._is_in_backward = True
            try:
                roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                weight = self.balancer.weight_of(roots[0])
                grads = grad_tensors if weight == 1.0 else _weighed(roots, grad_tensors, weight)
                _call_at_end_of_graph(roots[0], self.balancer.stopwatch.stop)
                original(tensors, grads, *args, **kwargs)
            finally:
                self._is_in_backward = False
            if self._is_synced:
                self.balancer.end_of_sums()

        return backward


def _weighed(roots: list[torch.Tensor], grads: Any, weight: float) -> list[torch.Tensor]:
    """Return the gradients of the roots, each times the weight."""
    given = [grads] if isinstance(grads, torch.Tensor) or grads is None else list(grads)
    given += [None] * (len(roots) - len(given))
    return [
        torch.full_like(root, weight) if grad is None else grad * weight
        for root, grad in zip(roots, given, strict=True)
    ]


def _call_at_end_of_graph(root: torch.Tensor, mark: Callable[[], None]) -> None:
    """Call a function when the next backward pass from this tensor has done its own graph.

    A hook on the root queues it when the pass begins. DDP queues its wait for the sums later, so the mark comes first.
    """
    waiting = [mark]

    def on_root(gradient: torch.Tensor) -> None:
        if waiting:  # a second pass through a graph that was kept runs the hook again
            torch.autograd.Variable._execution_engine.queue_callback(waiting.pop())

    root.register_hook(on_root)


def _replace(owner: Any, name: str, patched: Callable[[Function], Function]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(patched(original)))
