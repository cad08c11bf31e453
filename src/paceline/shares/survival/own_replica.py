"""Replica of this rank: its ranks vote on each step, and end with the first of them that is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed

from paceline.shares.survival.replicas import loss_of, losses_so_far
from paceline.shares.survival.roll_call import END_TIMEOUT_S, LONG, end_of

dist: Any = torch.distributed  # it does not export the types of all its names
STDERR = 2
TOLD_S = 2.0  # for the launcher to tell why a collective of the replica has failed


class OwnReplica:
    """Ranks that hold one replica of the model with this rank.

    Args:
        members: their numbers, in the order of their shards.
        rank: number of this rank.

    Attributes:
        members: as given.
        group: process group of the replica; None until it is known, and for a rank that holds the whole model.
    """

    def __init__(self, members: Sequence[int], rank: int) -> None:
        self.members = tuple(members)
        self.group: Any = None
        self._rank = rank
        self._losses = 0
        self._has_ended = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def is_several(self) -> bool:
        """Whether there are other ranks."""
        return len(self.members) > 1

    def watch(self, store: Any, losses: int | None = None) -> None:
        """End this process as soon as another rank of the replica is lost.

        Args:
            store: client of the launcher's store, for a thread alone.
            losses: number of losses before; None for those so far.
        """
        if self.is_several:
            self._losses = losses_so_far(store, self.members) if losses is None else losses
            self._watcher = threading.Thread(target=self._watch, args=(store,), daemon=True)
            self._watcher.start()

    def all_have(self, *has: bool) -> list[bool]:
        """Return of each thing that this rank has or has not whether all ranks of the replica have it."""
        if not self.is_several:
            return list(has)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        votes = torch.tensor(has, dtype=torch.float32, device="cpu")
        self.group.allreduce([votes], options).wait()
        return [bool(each) for each in votes]

    def told_by_first(self, tell: Callable[[], Sequence[float]]) -> list[float]:
        """Return numbers that the first rank of the replica tells, the same many each time, to all of them."""
        if not self.is_several:
            return list(tell())
        is_first = self._rank == self.members[0]
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        content = torch.tensor(tell() if is_first else [], dtype=torch.float64, device="cpu")
        size[0] = len(content)
        self._spread(size)
        if not is_first:
            content = torch.zeros(int(size), dtype=torch.float64, device="cpu")
        self._spread(content)
        numbers: list[float] = content.tolist()
        return numbers

    def await_loss(self) -> None:
        """Wait a moment for the loss of another rank, with which this process ends."""
        if self._watcher is not None:
            self._watcher.join(TOLD_S)

    def end(self, store: Any) -> None:
        """End the thread that watches, which could not go on once the interpreter ends."""
        self._has_ended.set()
        if self._watcher is not None:
            with suppress(RuntimeError):  # the launcher has ended, and so has the thread
                store.compare_set(loss_of(self.members, self._losses + 1, self._rank), "", "")
            self._watcher.join(END_TIMEOUT_S)

    def _spread(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([tensor], options).wait()

    def _watch(self, store: Any) -> None:
        with suppress(RuntimeError):  # the launcher has ended
            while not self._has_ended.is_set():
                key = loss_of(self.members, self._losses + 1, self._rank)
                store.wait([key], LONG)
                lost = store.get(key).decode()
                if not lost:
                    return
                self._losses += 1
                if int(lost) != self._rank and not store.check([end_of(int(lost))]):
                    self._leave(int(lost))

    def _leave(self, lost: int) -> None:
        text = f"paceline: rank {self._rank} ends with rank {lost}, which held another shard of its replica\n"
        os.write(STDERR, text.encode())  # the other threads may be anywhere
        os.kill(os.getpid(), signal.SIGKILL)
