"""Assignment of minibatches to workers. Minibatches are numbers here; no data are read."""

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import Any

from paceline.core.events import Minibatch


class MinibatchSampler:
    """Queue of minibatches for each shard of the data.

    A shared data set is one shard that all workers own. A partitioned data set has one shard per worker; the shards
    of a lost worker are assigned to the others until it returns.

    A reserve is a forecast of a worker's next minibatches, with which it can load data ahead. It is binding unless
    the data of the run are used up: then a worker without a minibatch takes one from the reserve of another worker.

    Args:
        n: number of workers, >= 1.
        per_epoch: number of minibatches in one pass over a shard; None to draw with replacement.
        partitioned: whether each worker has its own shard.
        requeue: whether a minibatch whose gradient was not applied is assigned again.
        per_run: number of minibatches of a shard in the whole run; None for no limit. With `requeue`, each of them
            is applied exactly once.
        ahead: minibatches in the reserve of each worker, >= 0; 0 for partitioned data.
    """

    def __init__(
        self,
        n: int,
        *,
        per_epoch: int | None,
        partitioned: bool,
        requeue: bool = True,
        per_run: int | None = None,
        ahead: int = 0,
    ) -> None:
        shards = n if partitioned else 1
        self._requeue = requeue and per_epoch is not None
        self.is_limited = per_run is not None and self._requeue
        self._queues = [_Shard(shard, per_epoch, per_run if self.is_limited else None) for shard in range(shards)]
        self._partitioned = partitioned
        self._owners = {shard: shard for shard in range(shards)}
        self._turns: dict[int, int] = {}
        self._ahead = ahead
        self._reserves: dict[int, deque[Minibatch]] = {}

    def next(self, worker: int, count: int = 1) -> Minibatch:
        """Return the next minibatch of a worker; a worker that owns several shards takes them in turn.

        Args:
            worker: number of the worker.
            count: largest number of minibatches for its local steps, >= 1; one without a reserve.
        """
        if not self._ahead:
            return self._next_of_queue(worker, count)
        reserve = self._reserves.setdefault(worker, deque())
        self._fill(reserve, self._ahead + 1)
        # The last minibatch of the longest reserve would be needed last.
        return reserve.popleft() if reserve else max(self._reserves.values(), key=len).pop()

    def upcoming(self, worker: int) -> tuple[Minibatch, ...]:
        """Return the reserve of a worker, oldest first."""
        return tuple(self._reserves.get(worker, ()))

    def release(self, worker: int) -> None:
        """Queue the reserve of a worker again."""
        for minibatch in self._reserves.pop(worker, ()):
            self._queues[minibatch.shard].returned.append(minibatch)

    def _fill(self, reserve: deque[Minibatch], size: int) -> None:
        while len(reserve) < size and self._queues[0].has_next:
            reserve.append(self._queues[0].next(1))

    def _next_of_queue(self, worker: int, count: int) -> Minibatch:
        if not self._partitioned:
            return self._queues[0].next(count)
        owned = self._owned(worker)
        turn = self._turns[worker] = self._turns.get(worker, -1) + 1
        return owned[turn % len(owned)].next(count)

    def has_next(self, worker: int) -> bool:
        """Return whether a minibatch is left for the worker now."""
        return bool(self._owned(worker)) or any(self._reserves.values())

    @property
    def are_used_up(self) -> bool:
        """Whether no minibatch is left for any worker now."""
        return not any(queue.has_next for queue in self._queues) and not any(self._reserves.values())

    def _owned(self, worker: int) -> list["_Shard"]:
        """Return the shards that the worker may take from; at least one if the data are unlimited."""
        if not self._partitioned:
            return [queue for queue in self._queues if queue.has_next]
        owned = [self._queues[shard] for shard, owner in self._owners.items() if owner == worker]
        return [queue for queue in owned or [self._queues[worker % len(self._queues)]] if queue.has_next]

    def state_dict(self) -> dict[str, Any]:
        """Return the positions in the shards, the requeued minibatches, the reserves, and the owners of the shards."""
        shards = [{"dealt": queue.dealt, "returned": list(queue.returned)} for queue in self._queues]
        reserves = {worker: list(reserve) for worker, reserve in self._reserves.items()}
        return {"shards": shards, "owners": dict(self._owners), "turns": dict(self._turns), "reserves": reserves}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load such a state with the same number of shards."""
        for queue, saved in zip(self._queues, state["shards"], strict=True):
            queue.dealt = saved["dealt"]
            queue.returned = deque(saved["returned"])
        self._owners = dict(state["owners"])
        self._turns = dict(state["turns"])
        reserves = state.get("reserves", {})  # missing in early runs
        self._reserves = {worker: deque(reserve) for worker, reserve in reserves.items()}

    def put_back(self, minibatch: Minibatch) -> None:
        """Queue a minibatch again whose gradient was not applied."""
        if self._requeue:
            self._queues[minibatch.shard].returned.append(minibatch)

    def put_back_unused(self, minibatch: Minibatch, worker: int) -> None:
        """Queue minibatches again that were assigned to a worker, but not read; it may have loaded them."""
        if self._ahead:
            self._reserves[worker].appendleft(minibatch)
        elif minibatch.epoch is not None:
            self._queues[minibatch.shard].returned.append(minibatch)

    def assign_shards(self, live: list[int]) -> None:
        """Assign every shard to its own worker if that is live, and the other shards to live workers in turn."""
        heirs = [worker for worker in live if worker >= len(self._queues)] or live  # these have no shard of their own
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

    def next(self, count: int) -> Minibatch:
        """Return the next minibatches of one epoch, at most this number."""
        if self._per_epoch is None:
            return Minibatch(self._shard, None, None, count)
        if self.returned:
            first = self.returned.popleft()
            if first.length > count:
                self.returned.appendleft(first.after(count))
                first = first._replace(length=count)
            return first
        epoch, index = divmod(self.dealt, self._per_epoch)
        count = int(min(count, self._per_epoch - index, self._per_run - self.dealt))
        self.dealt += count
        return Minibatch(self._shard, epoch, index, count)
