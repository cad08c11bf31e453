"""The vector of a model, cut into slices that servers own: where it is cut, and what they tell each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.errors import UsageError


class FullVector(NamedTuple):
    """The vector of which a server may own a slice.

    Attributes:
        elements: of all slices.
        summed: from the shares of a slice in some sums to the sums over all slices.
    """

    elements: int
    summed: Callable[[Sequence[float]], list[float]]


class ShardPeers:
    """The servers of the other slices, as one of them knows them; here there are none.

    Whatever needs the whole vector is a function of sums over its elements: every server works out the sum over
    its own, they exchange these, and each goes on with the totals. All of them ask for the same sums in the same order.
    """

    def summed(self, shares: Sequence[float]) -> list[float]:
        """Return the sums over all slices, given the share of one's own in each."""
        return list(shares)

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each of them, in the order of the slices."""
        return []

    def models(self) -> list[dict[str, Any]]:
        """Return what each of them has of the model, by name."""
        return []

    def load(self, state: Mapping[str, Any]) -> None:
        """Let each of them go on from its part of the state of all."""


def shard_boundaries(sizes: Sequence[int], slices: int) -> list[int]:
    """Return where tensors of these sizes are cut, so that the largest slice is as small as it can be.

    Args:
        sizes: of tensors, in their order.
        slices: each of one tensor at least.

    Returns:
        `slices` + 1 positions; slice j has the tensors from position j to position j + 1.

    Raises:
        UsageError: there are fewer tensors than slices.

    >>> shard_boundaries([4, 1, 1, 1, 5], 2)
    [0, 3, 5]
    """
    if slices > len(sizes):
        raise UsageError(
            f"slices={slices}, but the model has {len(sizes)} tensors to share out: give at most that many"
        )
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= slices:
            high = middle
        else:
            low = middle + 1
    starts = _filled(sizes, high)
    spare = [each for each in range(len(sizes)) if each not in starts]
    return [*sorted(starts + spare[: slices - len(starts)]), len(sizes)]


def _filled(sizes: Sequence[int], capacity: int) -> list[int]:
    """Return the starts of slices, each filled up to a capacity."""
    starts: list[int] = []
    held = capacity
    for i, size in enumerate(sizes):
        held += size
        if held > capacity or not starts:
            starts.append(i)
            held = size
    return starts


def merge_shards(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of one server of the whole, of the states of those of its slices.

    Args:
        states: in the order of the slices.
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
