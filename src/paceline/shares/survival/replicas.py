"""Replicas of a model: the ranks that together hold one copy of it are lost together, and come back together."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

REPLICAS = "paceline/replicas"  # in the launcher's store: ranks of each replica, where one has several
LOSSES = "paceline/losses"  # in that store: number of losses in each replica, and the rank of each of them
CAME = "paceline/came"  # in that store, for each replica and number of losses: ranks that have begun again
GO_ON, LEAVE = "go on", "leave"  # in that store, what the ranks of a replica do once they have begun again
POLL_S = 0.02


class Replicas(NamedTuple):
    """Replicas of a model, of which each rank of one holds a shard.

    Attributes:
        members: ranks of each replica, in the order of their shards.

    Example:
        >>> replicas = Replicas(((0, 1), (2, 3)))
        >>> replicas.of(3), replicas.peers(3), replicas.peer(3, 0)
        ((2, 3), (1, 3), 1)
    """

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of_one_rank(cls, ranks: int) -> Replicas:
        """Return the replicas of ranks that each hold the whole model."""
        return cls(tuple((rank,) for rank in range(ranks)))

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the replica of a rank."""
        return next(each for each in self.members if rank in each)

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same shard as a rank, itself among them."""
        shard = self.of(rank).index(rank)
        return tuple(each[shard] for each in self.members)

    def peer(self, rank: int, other: int) -> int:
        """Return the rank with the shard of a rank in the replica of another one."""
        return self.of(other)[self.of(rank).index(rank)]


def tell_replicas(store: Any, replicas: Replicas) -> None:
    """Let the launchers, and ranks that come back, know the replicas."""
    store.set(REPLICAS, json.dumps(replicas.members))


def told_replicas(store: Any, ranks: int) -> Replicas:
    """Return the replicas of this many ranks."""
    if not store.check([REPLICAS]):
        return Replicas.of_one_rank(ranks)
    return Replicas(tuple(map(tuple, json.loads(store.get(REPLICAS)))))


def tell_replica(store: Any, replicas: Replicas, rank: int) -> None:
    """Tell the other ranks of its replica that a rank has ended: they cannot go on without its shard."""
    members = replicas.of(rank)
    if len(members) > 1:
        number = store.add(_losses(members), 1)
        for each in members:
            store.compare_set(loss_of(members, number, each), "", str(rank))


def losses_so_far(store: Any, members: Sequence[int]) -> int:
    """Return the number of losses in a replica."""
    return int(store.add(_losses(members), 0))


def loss_of(members: Sequence[int], number: int, rank: int) -> str:
    """Return the key under which a rank waits for a loss in its replica, by the number of losses up to it."""
    return f"{_losses(members)}/{number}/{rank}"


def await_replica(store: Any, members: Sequence[int], rank: int, have_ended: Callable[[], bool]) -> int | None:
    """Wait until all ranks of a replica have begun again, and return the number of losses in it until then.

    The first rank that knows decides for all: else one could wait for another that has left.

    Args:
        store: launcher's store.
        members: ranks of the replica.
        rank: number of this rank.
        have_ended: returns whether the other replicas have ended.

    Returns:
        the number of losses; None if the others have ended before.
    """
    while True:
        number = losses_so_far(store, members)
        keys = {each: f"{CAME}/{members[0]}/{number}/{each}" for each in members}
        store.set(keys[rank], "1")
        while losses_so_far(store, members) == number:
            found = GO_ON if store.check(list(keys.values())) else LEAVE if have_ended() else ""
            if found:
                decided = store.compare_set(f"{CAME}/{members[0]}/{number}", "", found).decode()
                return number if decided == GO_ON else None
            time.sleep(POLL_S)


def _losses(members: Sequence[int]) -> str:
    return f"{LOSSES}/{members[0]}"
