"""Steps of a worker that the average of all workers does not contain yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch

from paceline.server.flat_buffers import FlatBuffers, FlatLayout, copy_checked

Sign = Literal[1, -1]


class OwnSteps:
    """Steps of a worker that no completed sum contains: those in each sum that is under way, and the newest ones.

    Args:
        layout: layout of the model.
        device: device of the vectors.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        self._allocate = partial(layout.allocate, device)
        self._in_sums: deque[FlatBuffers] = deque()
        self._newest = self._zeros()
        self._unused: list[FlatBuffers] = []

    def add_to(self, vectors: FlatBuffers, sign: Sign) -> None:
        """Add these steps to vectors, or subtract them."""
        for own in (*self._in_sums, self._newest):
            add_vectors(vectors, own, sign)

    def take_newest(self, since_average: FlatBuffers) -> None:
        """Store the newest steps, given all steps since the average, and leave them in the argument."""
        for own in self._in_sums:
            add_vectors(since_average, own, -1)
        self._newest.copy_(since_average)

    def write_total(self, vectors: FlatBuffers) -> None:
        """Write the sum of all these steps."""
        vectors.memory.zero_()
        self.add_to(vectors, 1)

    def begin_sum(self) -> None:
        """Record that a sum with the newest steps has begun."""
        self._in_sums.append(self._newest)
        self._newest = self._unused.pop() if self._unused else self._zeros()

    def end_sum(self) -> None:
        """Remove the steps of the oldest sum, which is complete."""
        self._unused.append(self._in_sums.popleft())
        self._unused[-1].memory.zero_()

    def forget(self) -> None:
        """Set all steps to zero; the sums stay under way."""
        for own in (*self._in_sums, self._newest):
            own.memory.zero_()

    def clear(self) -> None:
        """Set all steps to zero, without a sum under way."""
        while self._in_sums:
            self.end_sum()
        self.forget()

    def state(self) -> list[torch.Tensor]:
        """Return copies of the steps in each sum and of the newest ones."""
        return [own.memory.clone() for own in (*self._in_sums, self._newest)]

    def load(self, state: Sequence[torch.Tensor]) -> None:
        """Restore such a state."""
        self.clear()
        for number, saved in enumerate(state):
            if number:
                self.begin_sum()
            copy_checked(self._newest.memory, saved)

    def _zeros(self) -> FlatBuffers:
        zeros = self._allocate()
        zeros.memory.zero_()
        return zeros


def add_vectors(total: FlatBuffers, vectors: FlatBuffers, sign: Sign = 1) -> None:
    """Add or subtract vectors; booleans are combined by `or`, and stay in a subtraction."""
    for sums, each in pairs(total, vectors):
        if sums.dtype != torch.bool:
            sums.add_(each, alpha=sign)
        elif sign > 0:
            sums.logical_or_(each)


def pairs(*vectors: FlatBuffers) -> zip[tuple[torch.Tensor, ...]]:
    """Return the flat vectors of several buffers, side by side: parameters, then buffers."""
    return zip(*([*each.flat_parameters, *each.flat_buffers] for each in vectors), strict=True)
