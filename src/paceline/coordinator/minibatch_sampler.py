"""Which minibatch a worker gets next; what was dropped goes back into the queue. Numbers only, no data."""

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import Any

from paceline.core.events import Minibatch


class MinibatchSampler:
    """Deals out minibatches from shards of the data.

    A shared data set is one shard that all workers own; a partitioned one has a shard a worker, and the shards
    of a lost worker are dealt out to the others until it returns.

    Args:
        n: workers.
        per_epoch: minibatches in one pass over a shard, or None to draw with replacement.
        partitioned: whether each worker has a shard of its own.
        requeue: whether a minibatch that was not applied is dealt out again.
        per_run: minibatches of a shard that are dealt out at all, None for no end. With `requeue`, every one of
            them is applied exactly once in the end.
    """

    def __init__(
        self,
        n: int,
        *,
        per_epoch: int | None,
        partitioned: bool,
        requeue: bool = True,
        per_run: int | None = None,
    ) -> None:
        shards = n if partitioned else 1
        self._requeue = requeue and per_epoch is not None
        self.is_limited = per_run is not None and self._requeue
        self._queues = [_Shard(shard, per_epoch, per_run if self.is_limited else None) for shard in range(shards)]
        self._partitioned = partitioned
        self._owners = {shard: shard for shard in range(shards)}
        self._turns: dict[int, int] = {}

    def next(self, worker: int) -> Minibatch:
        """Return the worker's next minibatch; one that owns several shards takes them in turn."""
        if not self._partitioned:
            return self._queues[0].next()
        owned = self._owned(worker)
        turn = self._turns[worker] = self._turns.get(worker, -1) + 1
        return owned[turn % len(owned)].next()

    def has_next(self, worker: int) -> bool:
        """Return whether there is a minibatch left for the worker, at the moment."""
        return bool(self._owned(worker))

    @property
    def are_used_up(self) -> bool:
        """Whether nothing is left to deal out to anybody, at the moment."""
        return not any(queue.has_next for queue in self._queues)

    def _owned(self, worker: int) -> list["_Shard"]:
        """Return the shards that the worker may take from now; of data without an end, at least one."""
        if not self._partitioned:
            return [queue for queue in self._queues if queue.has_next]
        owned = [self._queues[shard] for shard, owner in self._owners.items() if owner == worker]
        return [queue for queue in owned or [self._queues[worker % len(self._queues)]] if queue.has_next]

    def state_dict(self) -> dict[str, Any]:
        """Return what was dealt out, what came back, and who owns which shard."""
        shards = [{"dealt": queue.dealt, "returned": list(queue.returned)} for queue in self._queues]
        return {"shards": shards, "owners": dict(self._owners), "turns": dict(self._turns)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, of as many shards."""
        for queue, saved in zip(self._queues, state["shards"], strict=True):
            queue.dealt = saved["dealt"]
            queue.returned = deque(saved["returned"])
        self._owners = dict(state["owners"])
        self._turns = dict(state["turns"])

    def give_back(self, minibatch: Minibatch) -> None:
        """Take back a minibatch that was not applied."""
        if self._requeue:
            self._queues[minibatch.shard].returned.append(minibatch)

    def deal_out(self, live: list[int]) -> None:
        """Give every shard to its own worker where that is live, and the others to the live ones in turn."""
        heirs = [worker for worker in live if worker >= len(self._queues)] or live
        orphans = [shard for shard in self._owners if shard not in live]
        self._owners = {shard: shard for shard in self._owners}
        self._owners |= {shard: heirs[i % len(heirs)] for i, shard in enumerate(orphans) if heirs}


class _Shard:
    def __init__(self, shard: int, per_epoch: int | None, per_run: int | None) -> None:
        self.returned: deque[Minibatch] = deque()
        self.dealt = 0
        self._shard = shard
        self._per_epoch = per_epoch
        self._per_run = inf if per_run is None else per_run

    @property
    def has_next(self) -> bool:
        return bool(self.returned) or self.dealt < self._per_run

    def next(self) -> Minibatch:
        if self._per_epoch is None:
            return Minibatch(self._shard, None, None)
        if self.returned:
            return self.returned.popleft()
        epoch, index = divmod(self.dealt, self._per_epoch)
        self.dealt += 1
        return Minibatch(self._shard, epoch, index)
