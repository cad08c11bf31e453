"""Group of the living ranks: a gloo group for each generation, of which all operations end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from typing import Any

import torch
import torch.distributed

from paceline.shares.survival.roll import Roll
from paceline.shares.survival.roll_call import END_TIMEOUT_S, InterruptedMeetingError, RollCall, dispose

dist: Any = torch.distributed  # it does not export the types of all its names
Tensors = Sequence[Any]


class Operation:
    """Operation of a group inside.

    Attributes:
        generation: generation of the group.
        tensors: what it writes.
        future: future that ends with the operation, or when the group is given up.
        is_whole: whether it has ended well.
    """

    def __init__(self, generation: int, tensors: Tensors) -> None:
        self.generation = generation
        self.tensors = list(tensors)
        # With devices, a stream that waits for the future also waits for gloo's copies to them.
        devices = {each.device for each in tensors if each.device.type == "cuda"}
        self.future: Any = torch.futures.Future(devices=list(devices) or None)
        self.is_whole = False

    def end(self) -> None:
        """End the future."""
        self.future.set_result(self.tensors)


class LivingGroup:
    """Gloo group of the ranks that live, made anew for each generation.

    An operation ends at the latest when a rank is lost, whatever gloo does: its threads may wait for ever.

    Args:
        calls: roll call of the ranks.
        alone: number of a rank that comes back, and is alone until it enters a generation; None for one that lives.

    Attributes:
        generation: latest generation that this rank knows to have come.
        members: numbers of the ranks.
    """

    def __init__(self, calls: RollCall, alone: int | None = None) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._pending: set[Operation] = set()
        self._is_broken = False
        self._inner: Any = None
        roll = calls.roll()
        self.generation = roll.generation
        self.members = roll.living
        if alone is None:
            self.enter(roll)
        else:
            self.members = (alone,)

    def start(self, run: Callable[[Any], Any], tensors: Tensors) -> Operation:
        """Start an operation.

        Args:
            run: function of the gloo group that starts it.
            tensors: what it writes.
        """
        operation = Operation(self.generation, tensors)
        with self._lock:
            is_broken = self._is_broken
            if not is_broken:
                self._pending.add(operation)
        if is_broken:
            operation.end()
            return operation
        try:
            run(self._inner).get_future().add_done_callback(partial(self._end, operation))
        except RuntimeError:  # a connection is lost
            self._break(operation.generation)
        return operation

    @property
    def is_broken(self) -> bool:
        """Whether the gloo group was given up."""
        return self._is_broken

    def break_off(self) -> None:
        """Give up the gloo group."""
        self._break(self.generation)

    def next_roll(self) -> Roll:
        """Return the roll of a newer generation, which is waited for."""
        roll = self._calls.after(self.generation)
        with self._lock:
            self.generation = roll.generation
        return roll

    def enter(self, roll: Roll) -> None:
        """Make the gloo group of a generation, with all its other members.

        Raises:
            InterruptedMeetingError: a newer generation has come.
        """
        inner = self._calls.connect(roll)
        self._leave()
        with self._lock:
            self._inner = inner
            self._is_broken = False
        self._calls.check(roll)  # an event meanwhile has broken only the group before
        self.members = roll.living

    def close(self) -> None:
        """Leave for good."""
        self._calls.end()
        self._leave().join(END_TIMEOUT_S)

    def hand_over(self, content: dict[str, Any] | None, source: int) -> dict[str, Any]:
        """Return the content that a member has, and the others lack.

        Args:
            content: content, in that member alone.
            source: its rank.

        Raises:
            InterruptedMeetingError: a member was lost meanwhile.
        """
        buffer = BytesIO()
        if content is not None:
            torch.save(content, buffer)
        size = torch.tensor([buffer.tell()], device="cpu")
        self._spread(size, source)
        data = (
            torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
            if content is not None
            else size.new_empty(int(size), dtype=torch.uint8)
        )
        self._spread(data, source)
        handed: dict[str, Any] = torch.load(BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
        return handed

    def _spread(self, tensor: torch.Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = self.members.index(source)
        operation = self.start(lambda inner: inner.broadcast([tensor], options), [tensor])
        operation.future.wait()
        if not operation.is_whole:
            raise InterruptedMeetingError

    def _leave(self) -> threading.Thread:
        inner, self._inner = [self._inner] if self._inner is not None else [], None
        return dispose(inner)

    def _end(self, operation: Operation, done: Any) -> None:
        """End an operation, in a thread of gloo."""
        try:
            done.value()
        except RuntimeError:
            self._break(operation.generation)
            return
        with self._lock:
            is_pending = operation in self._pending
            self._pending.discard(operation)
            operation.is_whole |= is_pending
        if is_pending:
            operation.end()

    def _break(self, generation: int) -> None:
        """Give up the gloo group, if it still is that of a generation."""
        with self._lock:
            if generation != self.generation:
                return
            self._is_broken = True
            pending, self._pending = self._pending, set()
        for each in pending:
            each.end()

    def break_before(self, generation: int) -> None:
        """Give up the gloo group, because a newer generation has come."""
        if generation > self.generation:
            self._break(self.generation)
