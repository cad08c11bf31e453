"""Sharding of the parameter vector among servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from paceline.errors import UsageError


class FullVector(NamedTuple):
    """Full parameter vector, of which a server may own one shard.

    Attributes:
        elements: number of elements of all shards.
        summed: function from the partial sums of this shard to the sums over all shards.
    """

    elements: int
    summed: Callable[[Sequence[float]], list[float]]


class ShardPeers(ABC):
    """Servers of the other shards, seen from one of them.

    A value that depends on the full vector is a function of sums over its elements. Every server computes the sums of
    its shard, and all servers exchange them. All servers ask for the same sums in the same order.

    Attributes:
        not_finite: why the parameters of another shard are not finite; empty while they are, as far as is known.
    """

    not_finite = ""

    @abstractmethod
    def summed(self, shares: Sequence[float]) -> list[float]:
        """Return the sums over all shards, given the partial sums of this shard."""

    @abstractmethod
    def gather(self, part: Literal["state", "model"]) -> list[dict[str, Any]]:
        """Return the states of the other servers, or their tensors of the model by name, in the order of the shards."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state of all servers into the other servers."""


class NoPeers(ShardPeers):
    """Peers of a server that owns the full vector: none."""

    def summed(self, shares: Sequence[float]) -> list[float]:
        """Return the sums of the only shard."""
        return list(shares)

    def gather(self, part: Literal["state", "model"]) -> list[dict[str, Any]]:
        """Return nothing."""
        return []

    def load(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


def shard_boundaries(sizes: Sequence[int], shards: int) -> list[int]:
    """Return the boundaries of shards of whole tensors whose largest shard is as small as possible.

    Args:
        sizes: sizes of the tensors, in order.
        shards: number of shards, >= 1; each has at least one tensor.

    Returns:
        `shards` + 1 indices of tensors; shard j has the tensors from index j up to index j + 1.

    Raises:
        UsageError: there are fewer tensors than shards.

    >>> shard_boundaries([4, 1, 1, 1, 5], 2)
    [0, 3, 5]
    """
    if shards > len(sizes):
        raise UsageError(
            f"shards={shards}, but the model has {len(sizes)} tensors to share out: give at most that many"
        )
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= shards:
            high = middle
        else:
            low = middle + 1
    starts = _filled(sizes, high)
    spare = [each for each in range(len(sizes)) if each not in starts]
    return [*sorted(starts + spare[: shards - len(starts)]), len(sizes)]


def _filled(sizes: Sequence[int], capacity: int) -> list[int]:
    """Return the first tensors of shards, each filled up to a capacity."""
    starts: list[int] = []
    held = capacity
    for i, size in enumerate(sizes):
        held += size
        if held > capacity or not starts:
            starts.append(i)
            held = size
    return starts


def merge_shards(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a server without shards, from the states of the servers of all shards.

    Args:
        states: states in the order of the shards.
    """
    first = dict(states[0])
    first["model"] = {name: tensor for state in states for name, tensor in state["model"].items()}
    optimizer = {each: kept for state in states for each, kept in state["optimizer"]["state"].items()}
    first["optimizer"] = {**first["optimizer"], "state": optimizer}
    first["memories"] = {
        name: {vector: [piece for state in states for piece in state["memories"][name][vector]] for vector in memory}
        for name, memory in first["memories"].items()
    }
    if first["mean"] is not None:
        first["mean"] = {part: [piece for state in states for piece in state["mean"][part]] for part in first["mean"]}
    return first
