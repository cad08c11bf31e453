"""Processes that sum vectors up: a process group of all of them, which ends as a whole when somebody leaves it."""

from __future__ import annotations

import hmac
import json
import time
from datetime import timedelta
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.codec import decode, encode
from paceline.engines.distributed.rendezvous.rendezvous import Endpoint
from paceline.engines.distributed.transport.connection import (
    ConnectionLost,
    bytes_of,
    describe,
    dist,
    saying_when_broken,
    summarize_value,
)
from paceline.engines.distributed.transport.keepalive import end_when_silent, published, sockets
from paceline.engines.distributed.transport.process_group import AbortableGroup, PendingCollective
from paceline.errors import UsageError
from paceline.server.flat_buffers import FlatBuffers

BUCKET_BYTES = 1 << 24  # of a vector are summed at a time, while others wait or are under way
ANYBODY_NEW_S = 0.02
THREADS = 2  # which work on buckets
GLOO_WAITS = 5  # times its timeout, for a connection
SUMMABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64} | {
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}  # and complex numbers, as two


class Unreachable(ConnectionLost):
    """Everybody has come, and two of them do not reach each other."""


class MissingPeers(ConnectionLost):
    """Somebody has not come in time.

    Attributes:
        places: of those who have not.
    """

    def __init__(self, places: list[int]) -> None:
        super().__init__(f"nobody has come to place {', '.join(map(str, places))}")
        self.places = places


class ElasticGroup:
    """Sums vectors over its processes, each of which gets the same sum, to the last bit.

    Args:
        key: that only these know; each proves to each that it does.
        place: of this process among them, from 0.
        size: how many they are.
        uses_nccl: whether the vectors are on GPUs, a different one for each process; NCCL sums them then.

    Attributes:
        is_waiting: whether this process waits here for others.
    """

    def __init__(self, key: str, place: int, size: int, *, uses_nccl: bool = False) -> None:
        self._key = key
        self._place = place
        self._size = size
        self._uses_nccl = uses_nccl
        self._others = [other for other in range(size) if other != place]
        self._collective = AbortableGroup(place, size, THREADS)
        self.is_waiting = False

    def connect(self, at: Endpoint, silence_s: float, timeout_s: float = inf) -> None:
        """Wait until everybody is there, and connect.

        Args:
            at: where they find each other.
            silence_s: seconds after which a host that does not answer any more is taken for gone, or out of reach.
            timeout_s: for which the others are waited for.

        Raises:
            Absent: somebody did not come.
            Apart: somebody is out of this process's reach.
            Broken: somebody has left, or is a stranger.
        """
        if not self._others:
            return
        with saying_when_broken():
            store = dist.PrefixStore(f"ring/{self._digest('place').hex()}", at.client())
            self._await_others(store, timeout_s)
        before = sockets()
        timeout = timedelta(seconds=silence_s / GLOO_WAITS)
        try:
            self._collective.connect(store, at.device, timeout)
            end_when_silent(before, silence_s, published(store, self._size))
            if self._uses_nccl:
                self._collective.connect_gpus(dist.PrefixStore("nccl", store))
        except RuntimeError as error:
            raise Unreachable(summarize_value(str(error))) from error
        self._check_whole()
        self._recognise_others(timedelta(seconds=2 * silence_s))  # others may still try to connect

    def _await_others(self, store: Any, timeout_s: float) -> None:
        """Wait until everybody has begun to connect, which may be long after this process."""
        store.set(f"here/{self._place}", "here")
        deadline = time.monotonic() + timeout_s
        while not store.check([f"here/{other}" for other in self._others]):
            self._check_whole()
            if time.monotonic() > deadline:
                raise MissingPeers([other for other in self._others if not store.check([f"here/{other}"])])
            time.sleep(ANYBODY_NEW_S)

    def _recognise_others(self, timeout: timedelta) -> None:
        """Prove to everybody that this process knows the key, and see them prove it, as the store tells all it has."""
        ours, expected = (torch.zeros(self._size, 32, dtype=torch.uint8) for _ in range(2))
        for other in range(self._size):
            ours[other] = torch.frombuffer(bytearray(self._digest(f"{self._place} to {other}")), dtype=torch.uint8)
            expected[other] = torch.frombuffer(bytearray(self._digest(f"{other} to {self._place}")), dtype=torch.uint8)
        if not torch.equal(self._collective.exchange(ours, timeout), expected):
            self.break_off()
            raise ConnectionLost("somebody in the ring does not know its key")

    def _digest(self, text: str) -> bytes:
        return hmac.digest(self._key.encode(), text.encode(), "sha256")

    def _check_whole(self) -> None:
        if self._collective.is_broken:
            self.break_off()  # what has been connected meanwhile
            raise ConnectionLost("somebody has left")

    def begin_sum(self, vectors: FlatBuffers) -> list[PendingCollective]:
        """Begin to sum vectors up where they lie, floats and integers by adding, booleans as true where any is.

        Returns:
            what is to be waited for.

        Raises:
            Broken: somebody has left.
        """
        if not self._others:
            return []
        return [
            self._collective.all_reduce(piece, dist.ReduceOp.MAX if flat.dtype == torch.bool else dist.ReduceOp.SUM)
            for flat in [*vectors.flat_parameters, *vectors.flat_buffers]
            for piece in _real(flat).split(max(1, BUCKET_BYTES // flat.itemsize))
        ]

    def wait(self, begun: list[PendingCollective], timeout_s: float = inf) -> bool:
        """Wait until sums are there; return whether they are.

        Raises:
            Broken: somebody has left.
        """
        self.is_waiting = True
        try:
            return self._collective.wait(begun, timeout_s)
        finally:
            self.is_waiting = False

    def spread(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """Return the state that the first process gives; the others give None.

        Raises:
            Broken: somebody has left.
        """
        tensors: dict[str, Tensor] = {}
        value = encode(state, tensors)
        forms = {name: describe(each) for name, each in tensors.items()}
        value, forms = json.loads(self._spread_text(json.dumps([value, forms])))
        if state is None:
            tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in forms.items()}
        self._broadcast(*(bytes_of(each) for each in tensors.values() if each.numel()))
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
        self._collective.break_off()

    def give_up(self) -> None:
        """Let nobody wait here any more, and the others hear nothing of it; from any thread."""
        self._collective.give_up()

    def end(self) -> None:
        """Let the others leave, one after another, while the last sum comes to its end; from any thread."""
        self._collective.is_over = True

    def let_go(self) -> None:
        """Take the ring apart, when nothing is done any more to what was to be summed."""
        self._collective.let_go()

    def _broadcast(self, *tensors: Tensor) -> None:
        if self._others:
            self.wait([self._collective.broadcast(each) for each in tensors])


def _real(flat: Tensor) -> Tensor:
    """Return a view of numbers that can be summed over a network."""
    if flat.is_complex():
        return torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat


def check_summable(model: nn.Module) -> None:
    """Refuse a model of which something cannot be summed up.

    Raises:
        UsageError: a parameter or a buffer has such numbers.
    """
    trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    for name, each in [*trained, *model.named_buffers()]:
        if not each.is_complex() and each.dtype not in SUMMABLE:
            raise UsageError(
                f"{name} is of {each.dtype}, which the ranks of torchrun cannot sum; without a server the model's "
                f"integers have to be int8, uint8, int32, int64 or bool, its floats at least of 16 bits"
            )
