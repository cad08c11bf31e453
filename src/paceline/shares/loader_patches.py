"""Patches of data loaders: the batches of training loaders are cut, and each one that is handed out is noted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from paceline.shares.balancer import Balancer
from paceline.shares.batches import CutSampler, Dealt, numbered
from paceline.shares.division import own_batch
from paceline.shares.handed_out import MOST_WAITING, Loader
from paceline.shares.rank_batches import Batch, is_dealt_by_rank
from paceline.shares.survival.surviving_training import SurvivingTraining

Function = Callable[..., Any]


class LoaderPatches:
    """Patches of the data loaders of this rank.

    A script may begin to iterate over a loader before it has a model. Such batches have equal shares until then.

    Args:
        find_balancer: returns the balancer of this rank; None before the first model.
        survival: survival of this rank, where others may be lost; None where they may not.
    """

    def __init__(self, find_balancer: Callable[[], Balancer | None], survival: SurvivingTraining | None) -> None:
        self._find_balancer = find_balancer
        self._survival = survival
        self._thread = threading.get_ident()
        self._loaders: WeakKeyDictionary[Any, ref[Loader]] = WeakKeyDictionary()  # by iterator
        self._early: WeakKeyDictionary[Any, deque[Dealt]] = WeakKeyDictionary()  # by iterator, before the first model
        self._is_closed = False

    def install(self, replace: Callable[[Any, str, Callable[[Any], Any]], None]) -> None:
        """Replace the functions by which a script reads batches.

        Args:
            replace: function that replaces an attribute by what a function makes of it.
        """
        replace(DataLoader, "_index_sampler", self._with_index_sampler)
        replace(_BaseDataLoaderIter, "__init__", self._with_iterator)
        replace(_BaseDataLoaderIter, "__next__", self._with_next)

    def before_pass(self, balancer: Balancer) -> None:
        """Tell a balancer before its first forward pass what that computes, if the script has taken no batch since."""
        if not self._early:
            return
        early, self._early = self._early, WeakKeyDictionary()
        if balancer.batches.are_none:
            for iterator, batches in early.items():
                for dealt in batches:
                    balancer.handed_out(self._loader_of(iterator), dealt)

    def close(self) -> None:
        """Leave the loaders as they are from here on: the training has ended."""
        self._is_closed = True

    def _with_index_sampler(self, original: property) -> property:
        def index_sampler(loader: Loader) -> Any:
            sampler = original.fget(loader)  # type: ignore[misc]
            if self._is_closed or not dist.is_initialized() or sampler is not loader.batch_sampler:
                return sampler
            ranks = dist.get_world_size()
            if ranks == 1 or not is_dealt_by_rank(sampler, ranks):
                return sampler
            return CutSampler(sampler, ranks, partial(self._deal, loader))

        return property(index_sampler)

    def _deal(self, loader: Loader, batches: Sequence[Batch]) -> tuple[Batch, Dealt]:
        balancer = self._find_balancer()
        if balancer is not None:
            return balancer.deal(loader, batches)
        own, dealt = own_batch(batches, dist.get_rank())
        if self._survival is not None:
            dealt = numbered(dealt, batches, loader.batch_sampler, self._survival.ledger_of(loader))
        return own, dealt

    def _with_iterator(self, original: Function) -> Function:
        @wraps(original)
        def init(iterator: Any, loader: Loader, *args: Any, **kwargs: Any) -> None:
            original(iterator, loader, *args, **kwargs)
            self._loaders[iterator] = ref(loader)

        return init

    def _with_next(self, original: Function) -> Function:
        @wraps(original)
        def next_batch(iterator: Any) -> Any:
            balancer = self._find_balancer()
            if balancer is None:
                return self._early_batch(iterator, original)
            loader = self._loader_of(iterator)
            is_by_thread = threading.get_ident() != self._thread
            if not is_by_thread:
                balancer.stopwatch.restart()
            try:
                batch = original(iterator)
                while not balancer.handed_out(loader, _taken_from(iterator._index_sampler), is_by_thread=is_by_thread):
                    batch = original(iterator)
            except StopIteration:
                batch = balancer.owed_batch(loader)
                if batch is None:
                    raise
            return batch

        return next_batch

    def _early_batch(self, iterator: Any, original: Function) -> Any:
        try:
            batch = original(iterator)
        except StopIteration:
            self._early.pop(iterator, None)
            raise
        dealt = _taken_from(iterator._index_sampler)
        if dealt is not None and not self._is_closed and torch.is_grad_enabled():
            self._early.setdefault(iterator, deque(maxlen=MOST_WAITING)).append(dealt)
        return batch

    def _loader_of(self, iterator: Any) -> Loader | None:
        found = self._loaders.get(iterator)
        return found() if found is not None else None


def _taken_from(sampler: Any) -> Dealt | None:
    """Return how the batch was divided that a loader with this sampler has just returned."""
    return sampler.dealt.popleft() if isinstance(sampler, CutSampler) else None
