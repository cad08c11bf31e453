"""Steps of a worker that the average of all workers does not contain yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout, copy_checked
from paceline.worker.allreduce.vectors import Sign, add_vectors


class _Summed(NamedTuple):
    """Fragment whose sum is under way, and the steps of this worker in it."""

    fragment: int
    steps: FlatBuffers


class OwnSteps:
    """Steps of a worker that no completed sum contains: those in each sum that is under way, and the newest ones.

    Args:
        layout: layout of the model, with a shard for each fragment that is summed by itself.
        device: device of the vectors.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        self._layouts = layout.shard_layouts
        self._device = device
        self._in_sums: deque[_Summed] = deque()
        self._newest = layout.allocate(device)

    def add_to(self, vectors: FlatBuffers, sign: Sign) -> None:
        """Add these steps to vectors, or subtract them."""
        self._add_summed_to(vectors, sign)
        add_vectors(vectors, self._newest, sign)

    def take_newest(self, since_average: FlatBuffers) -> None:
        """Store the newest steps, given all steps since the average, and leave them in the argument."""
        self._add_summed_to(since_average, -1)
        self._newest.copy_(since_average)

    def write_total(self, vectors: FlatBuffers) -> None:
        """Write the sum of all these steps."""
        vectors.memory.zero_()
        self.add_to(vectors, 1)

    def begin_sum(self, fragment: int) -> None:
        """Record that a sum with the newest steps of a fragment has begun."""
        newest = self._newest.shards[fragment]
        steps = self._layouts[fragment].allocate(self._device)
        steps.copy_(newest)
        newest.memory.zero_()
        self._in_sums.append(_Summed(fragment, steps))

    def end_sum(self) -> None:
        """Remove the steps of the oldest sum, which is complete."""
        self._in_sums.popleft()

    def forget(self) -> None:
        """Set all steps to zero; the sums stay under way."""
        for _, steps in self._in_sums:
            steps.memory.zero_()
        self._newest.memory.zero_()

    def clear(self) -> None:
        """Set all steps to zero, without a sum under way."""
        self._in_sums.clear()
        self.forget()

    def state(self) -> dict[str, Any]:
        """Return copies of the newest steps, and of the fragment and the steps of each sum."""
        in_sums = [(fragment, steps.memory.clone()) for fragment, steps in self._in_sums]
        return {"newest": self._newest.memory.clone(), "in_sums": in_sums}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        self.clear()
        for fragment, saved in state["in_sums"]:
            copy_checked(self._newest.shards[fragment].memory, saved)  # from where `begin_sum` takes them
            self.begin_sum(fragment)
        copy_checked(self._newest.memory, state["newest"])

    def _add_summed_to(self, vectors: FlatBuffers, sign: Sign) -> None:
        for fragment, steps in self._in_sums:
            add_vectors(vectors.shards[fragment], steps, sign)
