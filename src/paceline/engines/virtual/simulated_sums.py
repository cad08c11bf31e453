"""Sums of a simulation without a server: that of the open update, and those that are under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from paceline.tensors.flat_buffers import FlatBuffers, copy_checked
from paceline.utils.state_dict import check_kind
from paceline.worker.allreduce.vectors import add_payload


class IterationSum(NamedTuple):
    """Sum of the payloads and of the shares of an iteration."""

    iteration: int
    total: FlatBuffers
    shares: float


class SimulatedSums:
    """Sums of payloads and of their shares.

    Args:
        allocate: function that returns memory for one more sum.

    Attributes:
        total: sum of the payloads of the open update.
        shares: sum of their shares, 0 before the first one.
    """

    def __init__(self, allocate: Callable[[], FlatBuffers]) -> None:
        self._allocate = allocate
        self.total = allocate()
        self.shares = 0.0
        self._under_way: list[IterationSum] = []

    def add(self, payload: FlatBuffers, share: float) -> None:
        """Add a payload to the sum of the open update, or begin the sum with it."""
        add_payload(self.total, payload, is_first=not self.shares)
        self.shares += share

    def begin(self, iteration: int) -> None:
        """Begin to exchange the sum of the open update, as that of an iteration."""
        self._under_way.append(IterationSum(iteration, self.total, self.shares))
        self.total = self._allocate()

    def ended(self, last: int) -> Iterator[IterationSum]:
        """Yield the sums of all iterations up to this one, which are no longer under way."""
        while self._under_way and self._under_way[0].iteration <= last:
            yield self._under_way.pop(0)

    def state_dict(self) -> dict[str, Any]:
        """Return all sums."""
        return {
            "_shares": self.shares,
            "total": self.total.memory.clone() if self.shares else None,
            "sums": [(iteration, total.memory.clone(), shares) for iteration, total, shares in self._under_way],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such sums of the same model.

        Raises:
            TypeError: the sum of the shares is no number.
            ValueError: a tensor has another shape or dtype than here.
        """
        check_kind("_shares", state["_shares"], self.shares)
        self.shares = state["_shares"]
        if state["total"] is not None:
            copy_checked(self.total.memory, state["total"])
        for iteration, saved, shares in state.get("sums", ()):  # missing in early runs
            total = self._allocate()
            copy_checked(total.memory, saved)
            self._under_way.append(IterationSum(iteration, total, shares))
