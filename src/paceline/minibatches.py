"""Which minibatch a worker gets next; what was dropped goes back into the queue. Numbers only, no data."""

from collections import deque

from paceline.events import Minibatch


class Minibatches:
    """Deals out minibatches from shards of the data.

    A shared data set is one shard that all workers own; a partitioned one has a shard a worker, and the shards
    of a lost worker are dealt out to the others until it returns.

    Args:
        n: workers.
        per_epoch: minibatches in one pass over a shard, or None to draw with replacement.
        partitioned: whether each worker has a shard of its own.
        requeue: whether a minibatch that was not applied is dealt out again.
    """

    def __init__(self, n: int, *, per_epoch: int | None, partitioned: bool, requeue: bool = True) -> None:
        shards = n if partitioned else 1
        self._queues = [_Shard(shard, per_epoch) for shard in range(shards)]
        self._requeue = requeue and per_epoch is not None
        self._partitioned = partitioned
        self._owners = {shard: shard for shard in range(shards)}
        self._turns: dict[int, int] = {}

    def next(self, worker: int) -> Minibatch:
        """Return the worker's next minibatch; one that owns several shards takes them in turn."""
        if not self._partitioned:
            return self._queues[0].next()
        owned = [shard for shard, owner in self._owners.items() if owner == worker]
        owned = owned or [worker % len(self._queues)]
        turn = self._turns[worker] = self._turns.get(worker, -1) + 1
        return self._queues[owned[turn % len(owned)]].next()

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
    def __init__(self, shard: int, per_epoch: int | None) -> None:
        self.returned: deque[Minibatch] = deque()
        self._shard = shard
        self._per_epoch = per_epoch
        self._dealt = 0

    def next(self) -> Minibatch:
        if self._per_epoch is None:
            return Minibatch(self._shard, None, None)
        if self.returned:
            return self.returned.popleft()
        epoch, index = divmod(self._dealt, self._per_epoch)
        self._dealt += 1
        return Minibatch(self._shard, epoch, index)
