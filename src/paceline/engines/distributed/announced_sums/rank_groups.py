"""Groups of one rank without a server: that with the coordinator, and the newest one with the other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup
from paceline.engines.distributed.transport.announced_messages import OF_REPLICA, BeginShards
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.sum_messages import FormGroup, StoreKey


class RankGroups:
    """Groups that the coordinator announces to one rank; the first one is that with the coordinator.

    The thread of the sockets calls `put`, `announce`, `begin_shards` and `break_off`, another one uses the groups.

    Args:
        send: sends a key to the other members of a group.
        shard: number of the shard of this rank, whose groups have ranks with the same one; None for a whole replica.

    Attributes:
        of_replica: store of the ranks that have the shards of the replica; None for a whole one.
    """

    def __init__(self, send: Callable[[StoreKey], object], shard: int | None = None) -> None:
        self._send = send
        self._has_states = shard is None  # whether the first group is that with the coordinator
        self._prefix = "" if shard is None else f"{shard}/"
        self._stores: dict[int, GroupStore] = {}  # by number of the group
        self._groups: dict[int, ElasticGroup] = {}
        self._first = 0
        self._newest = 0
        self.of_replica: GroupStore | None = None

    def put(self, key: StoreKey) -> None:
        """Take a key of another member, which may come before the group is announced."""
        if key.key.startswith(OF_REPLICA):
            self._store_of_replica(key.generation).put(key)
        elif key.generation in self._stores or key.generation > self._newest:
            self._store(key.generation).put(key)

    def announce(self, form: FormGroup) -> None:
        """Take part in a group."""
        if self._has_states:
            self._first = self._first or form.generation
        self._newest = form.generation
        store = self._store(form.generation)
        group = ElasticGroup(
            form.key, form.rank, form.size, store, uses_nccl=form.uses_nccl, sums_early=form.sums_early
        )
        self._groups[form.generation] = group

    def begin_shards(self, begin: BeginShards) -> None:
        """Take part in the group of the ranks that have the shards of one replica."""
        self.of_replica = self._store_of_replica(begin.generation)

    def break_off(self) -> None:
        """End all waiting in the groups with other ranks."""
        for generation, group in list(self._groups.items()):
            if generation != self._first:
                group.abort_locally()

    def is_first(self, form: FormGroup) -> bool:
        """Return whether this is the group with the coordinator."""
        return form.generation == self._first

    def __getitem__(self, generation: int) -> ElasticGroup:
        return self._groups[generation]

    def close_before(self, generation: int) -> None:
        """Destroy the groups with other ranks that were there before this one."""
        for number in [each for each in list(self._groups) if self._first < each < generation]:
            self._stores.pop(number)
            group = self._groups.pop(number)
            group.abort_locally()
            threading.Thread(target=group.close, name="paceline-groups", daemon=True).start()  # gloo may take a second

    def end(self, *, has_failed: bool) -> None:
        """Take no further part: at a normal end the other ranks may still be summing."""
        for group in list(self._groups.values()):
            if has_failed:
                group.abort()
            else:
                group.complete()

    def close(self) -> None:
        """Destroy all groups."""
        for group in self._groups.values():
            group.close()

    def _store_of_replica(self, generation: int) -> GroupStore:
        return self._stores.setdefault(generation, GroupStore(generation, self._send))

    def _store(self, generation: int) -> GroupStore:
        if generation not in self._stores:
            self._stores[generation] = GroupStore(generation, self._send, self._prefix)
        return self._stores[generation]
