"""Group of the living ranks: a gloo group for each generation, of which all operations end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from paceline.shares.survival.agreement import Agreement
from paceline.shares.survival.own_process_group import Tensors
from paceline.shares.survival.roll import Roll
from paceline.shares.survival.roll_call import END_TIMEOUT_S, InterruptedMeetingError, RollCall, dispose

dist: Any = torch.distributed  # it does not export the types of all its names


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

    @property
    def work(self) -> Any:
        """Handle of torch, which waits for the future."""
        return _create_work_from_future(self.future)

    def end(self) -> None:
        """End the future."""
        self.future.set_result(self.tensors)


class LivingGroup:
    """Gloo group of the ranks that live, made anew for each generation.

    An operation ends at the latest when a rank is lost, whatever gloo does: its threads may wait for ever.

    Args:
        calls: roll call of the ranks.
        rank: number of this rank.
        is_alone: whether it comes back, and is alone until it enters a generation.

    Attributes:
        generation: latest generation that this rank knows to have come.
        members: numbers of the ranks.
        peers: those that hold the same shard of the model as this rank; all, if each holds the whole model.
    """

    def __init__(self, calls: RollCall, rank: int, *, is_alone: bool = False) -> None:
        self._calls = calls
        self._rank = rank
        self._lock = threading.Lock()
        self._pending: set[Operation] = set()
        self._is_broken = False
        self._inner: Any = None
        self._among_peers: Any = None
        roll = calls.roll()
        self.generation = roll.generation
        self.members = self.peers = roll.living
        if is_alone:
            self.members = self.peers = (rank,)
        else:
            self.enter(roll)

    def start(self, run: Callable[[Any], Any], tensors: Tensors, *, among_peers: bool = False) -> Operation:
        """Start an operation.

        Args:
            run: function of the gloo group that starts it.
            tensors: what it writes.
            among_peers: whether it is among the peers alone.
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
            work = run(self._among_peers if among_peers else self._inner)
            work.get_future().add_done_callback(partial(self._end, operation))
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
        """Make the gloo groups of a generation, with all its other members.

        Raises:
            InterruptedMeetingError: a newer generation has come.
        """
        peers = tuple(rank for rank in self._calls.replicas.peers(self._rank) if rank in roll.living)
        inner = among_peers = self._calls.connect(roll, roll.living)
        if peers != roll.living:
            try:
                among_peers = self._calls.connect(roll, peers)
            except InterruptedMeetingError:
                dispose([inner])
                raise
        self._leave()
        with self._lock:
            self._inner = inner
            self._among_peers = among_peers
            self._is_broken = False
        self._calls.check(roll)  # an event meanwhile has broken only the groups before
        self.members = roll.living
        self.peers = peers

    def be_alone(self, generation: int) -> None:
        """Leave the others, to come back later.

        Args:
            generation: generation that this rank does not belong to.
        """
        self._leave()
        with self._lock:
            self.generation = generation
            self._is_broken = False
        self.members = self.peers = (self._rank,)

    def close(self) -> None:
        """Leave for good."""
        self._calls.end()
        self._leave().join(END_TIMEOUT_S)

    def hand_over(self, agreed: Agreement, state: Callable[[], Any], result: Any) -> tuple[Any, Any]:
        """Return the state and the last result of the source of an agreement, as far as a rank lacks them; else None.

        Each rank gets the state of its peer in the replica of the source, which has the same shard.

        Args:
            agreed: the agreement.
            state: function that returns the state of this rank.
            result: last result of this rank.

        Raises:
            InterruptedMeetingError: a member was lost meanwhile.
        """
        handed_state, handed_result = None, None
        if agreed.given:
            source = self._calls.replicas.peer(self._rank, agreed.source)
            handed_state = self._spread(state() if self._rank == source else None, source, among_peers=True)
        if agreed.told:
            own = result if self._rank == agreed.source else None
            handed_result = self._spread(own, agreed.source, among_peers=False)
        return handed_state, handed_result

    def _spread(self, content: Any, source: int, *, among_peers: bool) -> Any:
        """Return the content that a member has."""
        buffer = BytesIO()
        if content is not None:
            torch.save(content, buffer)
        size = torch.tensor([buffer.tell()], device="cpu")
        options = dist.BroadcastOptions()
        options.rootRank = (self.peers if among_peers else self.members).index(source)
        self._broadcast(size, options, among_peers=among_peers)
        data = (
            torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
            if content is not None
            else size.new_empty(int(size), dtype=torch.uint8)
        )
        self._broadcast(data, options, among_peers=among_peers)
        return torch.load(BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)

    def _broadcast(self, tensor: torch.Tensor, options: Any, *, among_peers: bool) -> None:
        operation = self.start(lambda inner: inner.broadcast([tensor], options), [tensor], among_peers=among_peers)
        operation.future.wait()
        if not operation.is_whole:
            raise InterruptedMeetingError

    def _leave(self) -> threading.Thread:
        groups = [self._inner] if self._inner is not None else []
        if self._among_peers is not self._inner:
            groups.append(self._among_peers)
        self._inner = self._among_peers = None
        return dispose(groups)

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
