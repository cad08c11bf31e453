"""Queue of the sums of this rank that have begun and are not applied."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from paceline.core.events import Apply
from paceline.core.wire import Code
from paceline.engines.distributed.allreduce.base import GroupMembership
from paceline.engines.distributed.allreduce.compressed_sums import CompressedSum
from paceline.engines.distributed.transport.process_group import CompletionTimer, PendingCollective
from paceline.protocols.allreduce import AllReduceConfig
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.worker.allreduce.base import AllReduceAlgorithm


@dataclass(kw_only=True)
class BegunSum:
    """Sum that has begun after an iteration.

    Attributes:
        iteration: iteration whose payloads are summed.
        fragment: fragment of the model that is summed.
        total: payload of this rank, and the sum when it is complete.
        messages: memory of the messages of all ranks, if they are compressed and not decoded yet.
        pending: operations to wait for.
        completion: timer of these operations.
        reports_s: when all ranks had reported the iteration, in seconds since the run began.
        is_complete: whether this rank has waited for the sum.
        update: update of the iteration; None if it is still to come, or if no gradient was finite, so that the sum is
            zero.
    """

    iteration: int
    fragment: int
    total: FlatBuffers
    pending: list[PendingCollective]
    completion: CompletionTimer
    messages: Tensor | None
    reports_s: float = 0.0
    is_complete: bool = False
    update: Apply | None = None


class SumQueue:
    """Queue of sums, in the order in which they begin and end.

    Args:
        allreduce: when sums begin, and when they are awaited.
        algorithm: algorithm of this rank, whose payload is summed.
        layout: layout of the model, with a shard for each fragment.
        code: code of the payloads; None for sums of the payloads themselves.
    """

    def __init__(
        self, allreduce: AllReduceConfig, algorithm: AllReduceAlgorithm, layout: FlatLayout, code: Code | None
    ) -> None:
        self._allreduce = allreduce
        self._algorithm = algorithm
        self._layouts = layout.shard_layouts
        self._sums: deque[BegunSum] = deque()
        self._unused: list[list[FlatBuffers]] = [[] for _ in self._layouts]
        self._compressed = [CompressedSum(code, each) for each in self._layouts] if code is not None else []

    @property
    def left_out(self) -> list[FlatBuffers]:
        """What the compressed messages of each fragment have left out so far; empty without compression."""
        return [each.left_out for each in self._compressed]

    def __iter__(self) -> Iterator[BegunSum]:
        return iter(self._sums)

    def begin(self, iteration: int, membership: GroupMembership) -> None:
        """Begin the sum of an iteration's payloads, if it has one."""
        fragment = self._allreduce.summed_fragment(iteration)
        if fragment is None:
            return
        total = self._algorithm.payload
        if self._allreduce.separates_steps:  # the payload changes before the sum is complete
            payload = total.shards[fragment]
            unused = self._unused[fragment]
            total = unused.pop() if unused else self._layouts[fragment].allocate(payload.memory.device)
            total.copy_(payload)
        messages = None
        if self._compressed:
            messages, pending = self._compressed[fragment].begin(total, membership)
        else:
            pending = membership.begin_sum(total)
        self._sums.append(
            BegunSum(
                iteration=iteration,
                fragment=fragment,
                total=total,
                pending=pending,
                completion=CompletionTimer(pending),
                messages=messages,
            )
        )

    def awaited(self, iteration: int) -> list[BegunSum]:
        """Return the sums that are complete when an iteration ends."""
        begun = self._allreduce.awaited_sum(iteration)
        return [each for each in self._sums if begun is not None and each.iteration <= begun]

    def on_wait(self, iteration: int) -> None:
        """Record that the sums which an iteration awaits are complete."""
        for each in self.awaited(iteration):
            each.is_complete = True
            if each.messages is not None:
                self._compressed[each.fragment].finish(each.messages, each.total)
                each.messages = None

    def on_reports(self, iteration: int, now: float) -> None:
        """Record when all ranks had reported an iteration, for the sum that it has begun."""
        if self._allreduce.begins_sum(iteration):
            self._sums[-1].reports_s = now

    def on_update(self, iteration: int, update: Apply) -> None:
        """Record the update of an iteration, for the sum that it has begun, unless that is lost with its group."""
        if self._allreduce.begins_sum(iteration) and self._sums:
            self._sums[-1].update = update
            self._algorithm.begin_sum(self._sums[-1].fragment)

    def end(self, iteration: int) -> Iterator[tuple[BegunSum, Apply]]:
        """Remove the sums that are complete when an iteration ends; yield those with an update, and it."""
        for done in self.awaited(iteration):
            self._sums.popleft()
            if done.update is not None:
                yield done, done.update
            if self._allreduce.separates_steps:
                self._unused[done.fragment].append(done.total)

    def leave_group(self) -> None:
        """Forget all sums but a complete one whose update is still to come: the update may wait for a lost worker."""
        kept = [each for each in self._sums if each.is_complete and each.update is None][-1:]
        for each in kept:
            each.iteration = 0  # the next group counts its iterations from there
        self._sums = deque(kept)
