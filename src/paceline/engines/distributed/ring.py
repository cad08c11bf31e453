"""Processes that sum vectors up: a process group of all of them, which ends as a whole when somebody leaves it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import timedelta
from math import inf
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.state import decode, encode
from paceline.engines.distributed.line import (
    AT_ONCE,
    CONNECT_TIMEOUT,
    FOREVER,
    NOTHING,
    Broken,
    dist,
    in_short,
    saying_when_broken,
)
from paceline.engines.distributed.silence import end_when_silent, sockets
from paceline.vectors import Vectors

BUCKET_BYTES = 1 << 24  # of a vector are summed at a time, while others wait or are under way
LOOK_AGAIN_S = 0.0005
THREADS = 2  # which work on buckets
GLOO_WAITS = 5  # times its timeout, for a connection


class Apart(Broken):
    """Everybody has come, and two of them do not reach each other."""


class Ring:
    """Sums vectors over its processes, each of which gets the same sum, to the last bit.

    Args:
        store: where they find each other, a client of its own.
        key: that only these use.
        place: of this process among them, from 0.
        size: how many they are.
        device: of gloo, from `Meeting`.
        silence_s: seconds after which a host that does not answer any more is taken for gone, or out of reach.
        on_gpu: whether the vectors are on GPUs, a different one for each process; they are summed with NCCL then.

    Raises:
        Apart: somebody is out of this process's reach.
        Broken: somebody did not come.
    """

    def __init__(
        self, store: Any, key: str, place: int, size: int, device: Any, *, silence_s: float, on_gpu: bool
    ) -> None:
        self._others = [other for other in range(size) if other != place]
        self._group: Any = None
        self._nccl: Any = None
        self._is_broken = False
        if self._others:
            with saying_when_broken():
                store.set(f"{key}/here/{place}", "here")
                store.wait([f"{key}/here/{other}" for other in self._others], CONNECT_TIMEOUT)
            try:
                self._connect(store, key, place, device, silence_s, on_gpu)
            except RuntimeError as error:
                raise Apart(in_short(str(error))) from error

    def _connect(self, store: Any, key: str, place: int, device: Any, silence_s: float, on_gpu: bool) -> None:
        size = len(self._others) + 1
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=silence_s / GLOO_WAITS)
        options._devices = [device]
        options._threads = THREADS
        before = sockets()
        self._group = dist.ProcessGroupGloo(dist.PrefixStore(key, store), place, size, options)
        end_when_silent(before, silence_s)
        if on_gpu:
            options = dist.ProcessGroupNCCL.Options()
            self._nccl = dist.ProcessGroupNCCL(dist.PrefixStore(f"{key}/nccl", store), place, size, options)

    def begin_sum(self, vectors: Vectors) -> list[Any]:
        """Begin to sum vectors up where they lie, floats and integers by adding, booleans as true where any is.

        Returns:
            what is to be waited for.

        Raises:
            Broken: somebody has left.
        """
        if self._group is None:
            return []
        with saying_when_broken():
            return [
                self._all_reduce(piece, is_boolean=flat.dtype == torch.bool)
                for flat in [*vectors.flat_parameters, *vectors.flat_buffers]
                for piece in _real(flat).split(max(1, BUCKET_BYTES // flat.itemsize))
            ]

    def wait(self, begun: list[Any], timeout_s: float = inf) -> bool:
        """Wait until sums are there; return whether they are.

        Raises:
            Broken: somebody has left.
        """
        deadline = time.monotonic() + timeout_s
        for work in begun:
            while self._nccl is not None and not work.is_completed():  # it would wait for a GPU that nobody wakes
                if self._is_broken:
                    raise Broken("somebody has left")
                if time.monotonic() > deadline:
                    return False
                time.sleep(LOOK_AGAIN_S)
            left = timedelta(seconds=max(0.001, deadline - time.monotonic())) if timeout_s < inf else FOREVER
            try:
                work.wait(left)
            except RuntimeError as error:
                if not work.is_completed():
                    return False
                raise Broken(in_short(str(error))) from error
        return True

    def spread(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """Return the state that the first process gives; the others give None.

        Raises:
            Broken: somebody has left.
        """
        tensors: dict[str, Tensor] = {}
        value = encode(state, tensors)
        forms = {name: [str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()}
        value, forms = json.loads(self._spread_text(json.dumps([value, forms])))
        if state is None:
            tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in forms.items()}
        self._broadcast(*(each.view(-1).view(torch.uint8) for each in tensors.values() if each.numel()))
        given: dict[str, Any] = decode(value, tensors)
        return given

    def _spread_text(self, text: str) -> str:
        ours = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        size = torch.tensor(ours.shape)
        self._broadcast(size)
        room = ours if ours.shape == (int(size),) else torch.zeros(int(size), dtype=torch.uint8)
        self._broadcast(room)
        return room.numpy().tobytes().decode()

    def break_off(self) -> None:
        """Leave, so that whoever waits here or at another process hears of it at once; from any thread."""
        self._is_broken = True
        if self._nccl is not None:
            self._nccl.abort()
        for other in self._others:
            with suppress(RuntimeError):  # gloo ends a pair on which a wait has timed out, and in no other way
                self._group.recv([torch.zeros(1)], other, NOTHING).wait(AT_ONCE)

    def _all_reduce(self, piece: Tensor, *, is_boolean: bool) -> Any:
        options = dist.AllreduceOptions()
        options.timeout = FOREVER
        options.reduceOp = dist.ReduceOp.MAX if is_boolean else dist.ReduceOp.SUM
        return (self._nccl or self._group).allreduce([piece], options)

    def _broadcast(self, *tensors: Tensor) -> None:
        if self._group is None:
            return
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = FOREVER
        with saying_when_broken():
            self.wait([self._group.broadcast([each], options) for each in tensors])


def _real(flat: Tensor) -> Tensor:
    """Return a view of numbers that can be summed over a network."""
    if flat.is_complex():
        return torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat
