"""Elastic process group: sums vectors over its processes, and ends as a whole when one of them leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.codec import decode, encode
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.gloo import dist, shorten
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.process_group import AbortableGroup, PendingCollective
from paceline.engines.distributed.transport.tensor_descriptions import DTYPES, describe
from paceline.engines.distributed.transport.tensor_memory import as_bytes
from paceline.engines.distributed.transport.transport import Transport
from paceline.errors import UsageError
from paceline.tensors.flat_buffers import FlatBuffers

CHUNK_BYTES = 1 << 24  # of a vector in one operation
THREADS = 2  # of gloo
GLOO_WAITS = 5  # times its timeout, for a connection
SUMMABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64} | {
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}  # and complex numbers, as two


class MembershipChanged(Exception):  # noqa: N818  # no error
    """The members of the group change; a new one has to be formed."""


class Unreachable(ConnectionLost):
    """All members have come, but two of them cannot connect."""


class MissingPeers(ConnectionLost):
    """Some members have not come in time.

    Attributes:
        ranks: their ranks in the group.
    """

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"no process has come for rank {', '.join(map(str, ranks))} of the group")
        self.ranks = ranks


class ElasticGroup:
    """Process group that sums vectors; all processes get the same sum, to the last bit.

    Args:
        key: secret of the group; each member proves to each other one that it has it.
        rank: rank of this process in the group, from 0.
        size: number of processes.
        store: store in which the members find each other.
        uses_nccl: whether the vectors are on GPUs, a different one for each process, so that NCCL sums them.
        sums_early: whether there are early sums, in connections of their own: the order among others is not known.

    Attributes:
        rank: as given.
        size: as given.
        is_waiting: whether this process waits for others in an operation.
    """

    def __init__(
        self,
        key: str,
        rank: int,
        size: int,
        store: GroupStore,
        *,
        uses_nccl: bool = False,
        sums_early: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self._key = key
        self._store = store
        self._uses_nccl = uses_nccl
        self._peers = [peer for peer in range(size) if peer != rank]
        self._group = AbortableGroup(rank, size, THREADS)
        self._early = AbortableGroup(rank, size, THREADS) if sums_early else None
        self._tried: Any = None  # group of the last `check_links`
        self.is_waiting = False

    def connect(self, transport: Transport, host: str, timeout_s: float | None = None) -> None:
        """Wait until all members have come, and connect.

        Args:
            transport: transport of this process.
            host: address of this host, which the other members can reach.
            timeout_s: seconds to wait for the other members; None for no limit.

        Raises:
            MissingPeers: a member did not come.
            Unreachable: this process cannot connect to a member.
            ConnectionLost: a member has left, or does not have the key.
        """
        if not self._peers:
            return
        # A connection that fails after this is a broken link, not a rank that still computes (decision 0010).
        missing = self._await_members("ready", timeout_s)
        if missing:
            raise MissingPeers(missing)
        try:
            timeout_s = transport.heartbeat_timeout_s / GLOO_WAITS
            self._group.connect(transport, self._store, host, self._key, timeout_s=timeout_s)
            if self._early is not None:
                self._early.connect(transport, self._store, host, self._key, timeout_s=timeout_s, name="early")
            for group in self._groups if self._uses_nccl else ():
                group.connect_gpus()
        except RuntimeError as error:
            raise Unreachable(shorten(str(error))) from error
        self._check()

    def check_links(self, transport: Transport, host: str, number: int) -> str:
        """Return why this process can no longer connect to a member, while a sum takes long; empty if it can.

        A sum over a slow link and one over a link that was cut look the same. So all members connect once more, at the
        same time. A member that does not begin to connect proves nothing, and neither does a group that was aborted.

        Args:
            transport: transport of this process.
            host: address of this host, which the other members can reach.
            number: number of this check in the group.
        """
        prefix = f"check {number}"
        store = dist.PrefixStore(prefix, self._store)
        timeout_s = transport.heartbeat_timeout_s / GLOO_WAITS
        try:
            if not self._await_members(prefix, transport.heartbeat_timeout_s):
                # Other members may still be connecting to this one: the connections stay until the next check.
                self._tried = transport.group(store, self.rank, self.size, host, timeout_s=timeout_s)
        except ConnectionLost:
            return ""
        except RuntimeError as error:
            return shorten(str(error))
        return ""

    def _await_members(self, what: str, timeout_s: float | None) -> list[int]:
        """Wait until all members connect, which may be long after this process; return those that do not."""
        keys = {f"{what}/{rank}": rank for rank in range(self.size)}
        self._store.set(f"{what}/{self.rank}", b"")
        return [keys[key] for key in self._store.await_keys(list(keys), timeout_s)]

    def _check(self) -> None:
        if self._group.is_aborted:
            self.abort()  # also the connections that were made meanwhile
            raise ConnectionLost("the group was aborted")

    def begin_sum(self, vectors: FlatBuffers) -> list[PendingCollective]:
        """Start to sum vectors in place: floats and integers are added, booleans are true where any is.

        Returns:
            the operations to wait for.

        Raises:
            ConnectionLost: a member has left.
        """
        flats = [*vectors.flat_parameters, *vectors.flat_buffers]
        return [each for flat in flats for each in self._begin(self._group, flat)]

    def begin_early(self, vector: Tensor) -> list[PendingCollective]:
        """Start to sum a part of some vectors in place, as `begin_sum`; all members begin the same ones in one order.

        Raises:
            ConnectionLost: a member has left.
        """
        assert self._early is not None
        return self._begin(self._early, vector)

    def _begin(self, group: AbortableGroup, flat: Tensor) -> list[PendingCollective]:
        if not self._peers:
            return []
        operation = dist.ReduceOp.MAX if flat.dtype == torch.bool else dist.ReduceOp.SUM
        chunks = _summable_view(flat).split(max(1, CHUNK_BYTES // flat.itemsize))
        return [group.all_reduce(chunk, operation) for chunk in chunks]

    def begin_gather(self, message: Tensor) -> tuple[Tensor, list[PendingCollective]]:
        """Start to send a message, uint8 [nbytes], to all members.

        Returns:
            the messages of all members in the order of their ranks, uint8 [size, nbytes], and the operations to wait
            for.

        Raises:
            ConnectionLost: a member has left.
        """
        if not self._peers:
            return message[None], []
        rows, pending = self._group.all_gather(message)
        return rows, [pending]

    def wait(self, pending: list[PendingCollective], timeout_s: float = inf) -> bool:
        """Wait for operations; return whether all are complete before the timeout.

        Raises:
            ConnectionLost: a member has left.
        """
        self.is_waiting = True
        try:
            return self._group.wait(pending, timeout_s)
        finally:
            self.is_waiting = False

    def broadcast_state(self, state: dict[str, Any] | None, root: int = 0) -> dict[str, Any]:
        """Return the state of one rank of the group; the other members pass None.

        Raises:
            ConnectionLost: a member has left.
        """
        tensors: dict[str, Tensor] = {}
        value = encode(state, tensors)
        tensors = {name: each.cpu() for name, each in tensors.items()}
        described = {name: describe(each) for name, each in tensors.items()}
        value, described = json.loads(self._broadcast_text(json.dumps([value, described]), root))
        if state is None:
            tensors = {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in described.items()}
        self._broadcast([as_bytes(each) for each in tensors.values() if each.numel()], root)
        decoded: dict[str, Any] = decode(value, tensors)
        return decoded

    def _broadcast_text(self, text: str, root: int) -> str:
        ours = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        size = torch.tensor(ours.shape)
        self._broadcast([size], root)
        content = ours if ours.shape == (int(size),) else torch.zeros(int(size), dtype=torch.uint8)
        self._broadcast([content], root)
        return content.numpy().tobytes().decode()

    def abort(self) -> None:
        """End all waiting in the group, here now, and at the other members a moment later. Thread-safe."""
        self._store.abort()
        for group in self._groups:
            group.abort()

    def abort_locally(self) -> None:
        """End all waiting in this process; the other members do not notice. Thread-safe."""
        self._store.abort()
        for group in self._groups:
            group.abort_locally()

    def complete(self) -> None:
        """Allow the other members to leave while the last sum completes. Thread-safe."""
        for group in self._groups:
            group.is_complete = True

    def close(self) -> None:
        """Destroy the group; the vectors of its sums may not be in use any more."""
        for group in self._groups:
            group.close()
        self._tried = None

    @property
    def _groups(self) -> list[AbortableGroup]:
        return [self._group] if self._early is None else [self._group, self._early]

    def _broadcast(self, tensors: Sequence[Tensor], root: int) -> None:
        if self._peers:
            self.wait([self._group.broadcast(each, root) for each in tensors])


def _summable_view(flat: Tensor) -> Tensor:
    """Return a view of numbers that gloo and NCCL can sum."""
    if flat.is_complex():
        return torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat


def check_summable(model: nn.Module) -> None:
    """Refuse a model with numbers that cannot be summed.

    Raises:
        UsageError: a parameter or a buffer has an unsupported dtype.
    """
    trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    for name, each in [*trained, *model.named_buffers()]:
        if not each.is_complex() and each.dtype not in SUMMABLE:
            raise UsageError(
                f"{name} is of {each.dtype}, which the ranks of torchrun cannot sum; without a server the model's "
                f"integers have to be int8, uint8, int32, int64 or bool, its floats at least of 16 bits"
            )
