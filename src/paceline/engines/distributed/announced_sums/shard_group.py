"""Process group of the ranks that have the shards of one replica, as one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isclose
from typing import Any, Literal, NamedTuple

import torch

from paceline.checkpoint.shard_states import ShardStates
from paceline.core.events import Minibatch
from paceline.core.sharding import ShardPeers
from paceline.engines.distributed.transport.announced_messages import OF_REPLICA
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.process_group import AbortableGroup
from paceline.engines.distributed.transport.transport import Transport
from paceline.errors import UsageError
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.worker.gradient_source import GradientGroup, Interrupted, PartialGradient


class OwnShard(NamedTuple):
    """Shard of one rank.

    Attributes:
        group: group of the ranks that have the shards of its replica.
        saved: saved states of the shard; None for a run without a folder.
    """

    group: ShardGroup
    saved: ShardStates | None


class ShardGroup(GradientGroup, ShardPeers):
    """Process group of a replica, in which all ranks call the same methods in the same order.

    Whatever shards the model sums the gradients of the ranks, so that each has its shard of that of the whole
    minibatch. The ranks agree on what belongs to all shards: losses, samples, norms, whether a task is cancelled, and
    whether a sum is made. The thread of the worker and the one that follows the coordinator have connections of their
    own.

    Args:
        shard: number of the shard of this rank, from 0.
        size: number of ranks.
        is_cancelled: returns whether the task of this rank was cancelled.
    """

    def __init__(self, shard: int, size: int, is_cancelled: Callable[[], bool]) -> None:
        self.local_rank = shard
        self.size = size
        self._is_cancelled = is_cancelled
        self._steps = AbortableGroup(shard, size)
        self._sums = AbortableGroup(shard, size)

    def connect(self, transport: Transport, store: GroupStore, host: str, key: str) -> None:
        """Connect all ranks.

        Args:
            transport: transport of this process.
            store: store of the group.
            host: address of this host, which the other ranks can reach.
            key: secret of the group.

        Raises:
            ConnectionLost: a rank did not connect.
        """
        with _raising_connection_lost():
            self._steps.connect(transport, store, host, key, name=f"{OF_REPLICA} steps")
            self._sums.connect(transport, store, host, key, name=f"{OF_REPLICA} sums")

    # --- in the thread of the worker --------------------------------------------------------------------------

    def begin(self, draw: int, minibatch: Minibatch | None, version: FlatBuffers) -> None:
        """Do nothing: each rank gets its own task."""

    def check(self) -> None:
        """Cancel the task in all ranks if it was cancelled in one.

        Raises:
            Interrupted: the task was cancelled; all ranks raise this at the same place.
            ConnectionLost: a rank is gone.
        """
        self._summed_unless_cancelled([])

    def all_reduce(self, gradient: FlatBuffers, part: PartialGradient) -> PartialGradient:
        """Return the statistics of the whole minibatch; each rank has the gradient of its shard.

        Raises:
            UsageError: the ranks have different weights, but what sums their gradients takes a plain mean.
        """
        ours = part.samples if part.weight is None else part.weight
        weight, samples, loss, skipped, overflowed = self._summed_unless_cancelled(
            [
                ours,
                part.samples,
                part.loss / self.size,
                part.skipped,
                part.overflowed,
            ]
        )
        if not skipped and not isclose(ours * self.size, weight):
            raise UsageError(
                f"the gradients of the {self.size} ranks that hold a model together have different weights (here "
                f"{ours:g}, in the mean {weight / self.size:g}), but fully_shard takes their plain mean: divide the "
                "losses by a number that is the same on these ranks"
            )
        return part._replace(
            loss=loss,
            samples=int(samples),
            skipped=skipped > 0,
            overflowed=overflowed > 0,
            weight=None if part.weight is None else weight,
        )

    def whole_norm(self, norm: float) -> float:
        """Return the squared norm of the gradient of all shards."""
        return _summed(self._steps, [norm])[0]

    def _summed_unless_cancelled(self, ours: Sequence[float]) -> list[float]:
        is_cancelled, *rest = _summed(self._steps, [self._is_cancelled(), *ours])
        if is_cancelled:
            raise Interrupted
        return rest

    # --- in the thread that follows the coordinator -----------------------------------------------------------

    def agree(self, is_made: bool) -> bool:
        """Return whether the sums of all shards are made, given whether that of this shard is.

        Raises:
            ConnectionLost: a rank is gone.
        """
        return _summed(self._sums, [is_made])[0] == self.size

    def summed(self, shares: Sequence[float]) -> list[float]:
        """Return the sums over all shards, given those of this one."""
        return _summed(self._sums, shares)

    def gather(self, part: Literal["state", "model"]) -> list[dict[str, Any]]:
        """Return nothing: no process has the parameters of all shards."""
        return []

    def load(self, state: Mapping[str, Any]) -> None:
        """Do nothing: each rank loads its own shard."""

    def abort(self) -> None:
        """End all waiting in the group. Thread-safe."""
        for group in (self._steps, self._sums):
            group.abort()

    def close(self) -> None:
        """Destroy the group."""
        for group in (self._steps, self._sums):
            group.close()


def _summed(group: AbortableGroup, ours: Sequence[float]) -> list[float]:
    """Return the sums of the numbers of all ranks."""
    sums = torch.tensor(ours, dtype=torch.float64)
    with _raising_connection_lost():
        group.wait([group.all_reduce(sums)])
    return [float(each) for each in sums.tolist()]


@contextmanager
def _raising_connection_lost() -> Iterator[None]:
    try:
        yield
    except (ConnectionLost, RuntimeError) as error:  # gloo raises a RuntimeError
        raise ConnectionLost(f"a rank of this replica is gone: {error}".partition("\n")[0]) from error
