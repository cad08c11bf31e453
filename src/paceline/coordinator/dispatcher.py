"""Assignment of work to workers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import Any, ClassVar

from paceline.coordinator.iterations import Iterations
from paceline.coordinator.lease_queue import LeaseQueue
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.coordinator.minibatch_slices import cut, slices_of
from paceline.coordinator.ssp_bound import SSPBound
from paceline.coordinator.worker_table import BUSY, EXCLUDED, PROBED, WorkerState, WorkerStatus, WorkerTable
from paceline.core.events import Compute, Interrupt, Minibatch
from paceline.policies.controllers.base import LeaseRule
from paceline.protocols.local_steps import LocalSteps
from paceline.protocols.protocol import Protocol
from paceline.utils.state_dict import Stateful


class Dispatcher(Stateful):
    """Assigns work to workers by the rules of the protocol in force, and cancels it.

    Args:
        minibatches: assigns minibatches; None if workers draw samples themselves.
        local_steps: local steps of a worker's work; None for one gradient.

    Attributes:
        iterations: iterations of loops with several optimizers.
        table: status of every worker.
        is_limited: whether the number of minibatches is limited.
        is_restricted: whether a worker may have to wait for a minibatch, or for the loops of the others.
        is_due: whether an idle worker may have become free to start.
        queue: samples of the update in progress, of which workers take leases; None without leases.
    """

    _saved = ("is_due", "_queues")
    _defaults: ClassVar[Mapping[str, Any]] = {"_queues": 0}  # missing in early runs
    _parts = ("table", "minibatches", "ssp_bound")

    def __init__(self, minibatches: MinibatchSampler | None, local_steps: LocalSteps | None = None) -> None:
        self.table = WorkerTable()
        self.is_limited = minibatches is not None and minibatches.is_limited
        self.is_restricted = self.is_limited
        self.is_due = False
        self.queue: LeaseQueue | None = None
        self.iterations = Iterations()
        self._queues = 0  # so far, each with the next draws
        self._minibatches = minibatches
        self._local_steps = local_steps
        self._workers = self.table.workers
        self._idle = self.table.idle
        self._in_flight = self.table.in_flight
        self._dealt: dict[int, Minibatch | None] = {}  # work of the update that opens, until it is given
        self._once_an_update = False
        self._ssp_bound: SSPBound | None = None
        self._protocol: Protocol | None = None

    def begin_phase(self) -> None:
        """Begin a phase, in which no worker is ahead."""
        self._ssp_bound = None

    def follow(self, protocol: Protocol) -> None:
        """Apply the rules of this protocol from now on.

        Within a phase, a change of the lead alone, or of nothing, keeps how far each worker is ahead.
        """
        before, self._protocol = self._protocol, protocol
        self._once_an_update = protocol.refill != "arrival"
        if protocol.max_lead == inf:
            self._ssp_bound = None
        elif self._ssp_bound is not None and before == replace(protocol, max_lead=self._ssp_bound.bound):
            self._ssp_bound.bound = protocol.max_lead
        else:
            self._ssp_bound = SSPBound(protocol.max_lead)
            for worker in self.table.active():
                self._ssp_bound.join(worker)
        self.is_due = True

    @property
    def leads(self) -> dict[int, int]:
        """Gradients by which each worker is ahead of the slowest; empty without a bound."""
        return {} if self._ssp_bound is None else self._ssp_bound.leads

    # --- work ---------------------------------------------------------------------------------------------

    def may_start(self, worker: int, version: int) -> bool:
        """Return whether an idle worker may start work on this version."""
        if self.queue is not None:
            return self.queue.has_next(worker)
        if self._once_an_update and self._workers[worker].contributed_to == version:
            return False
        if self.is_restricted and self._has_to_wait(worker):
            return False
        return self._ssp_bound is None or self._ssp_bound.may_start(worker)

    def _has_to_wait(self, worker: int) -> bool:
        iterations = self.iterations
        if self.is_limited and not self.has_data(worker) and not iterations.goes_on(worker):
            return True
        return iterations.are_several and not iterations.may_start(worker, self.table.active())

    def begin_iterations(self) -> None:
        """Note that the loops step several optimizers."""
        self.iterations.are_several = True
        self.is_restricted = True

    def has_data(self, worker: int) -> bool:
        """Return whether there is a minibatch for the worker now."""
        return self._minibatches is None or worker in self._dealt or self._minibatches.has_next(worker)

    def deal(self, shares: Mapping[int, int], batch_size: int, rule: LeaseRule | None) -> None:
        """Assign the samples of the update that opens by these shares; workers take whole minibatches if one is busy.

        Args:
            shares: samples of each worker; with leases, of its first one.
            batch_size: samples of a whole minibatch, >= 1.
            rule: leases after the first ones; None for one share of each worker.
        """
        if self._in_flight:
            return
        if rule is None:
            self._deal_shares(shares, batch_size)
        else:
            self._queue_leases(shares, batch_size, rule)

    def _deal_shares(self, shares: Mapping[int, int], batch_size: int) -> None:
        """Cut the minibatches of idle workers; they stay whole if other workers than these are idle."""
        own: dict[int, Minibatch | None] = {}
        for worker in self._idle:
            if self.has_data(worker):
                own[worker] = self._minibatches.next(worker) if self._minibatches is not None else None
        draws = {worker: self._workers[worker].draw + 1 for worker in own}
        self._dealt = cut(own, draws, shares, batch_size) if own.keys() == shares.keys() else own

    def _queue_leases(self, shares: Mapping[int, int], batch_size: int, rule: LeaseRule) -> None:
        """Queue the minibatches of an update, of which workers take leases."""
        own: dict[int, Minibatch | None] = {}
        for number in range(rule.minibatches):
            if self._minibatches is None:
                own[number] = None
            elif self._minibatches.has_next(number):
                own[number] = self._minibatches.next(number)
        if own:
            self._queues += 1
            slices = slices_of(own, dict.fromkeys(own, self._queues), batch_size)
            self.queue = LeaseQueue(slices, shares, batch_size, rule)

    def begin_update(self) -> None:
        """Begin an update, without leases until a controller asks for them; a change of the protocol keeps a queue."""
        self.queue = None

    def end_lease(self, worker: int) -> Interrupt | None:
        """End the lease that a worker has delivered, if it has one, and cancel the copy of another worker."""
        other = self.queue.end(worker) if self.queue is not None else None
        return None if other is None else self.cancel(other, self._workers[other])

    def use_up(self, *, are_read: bool) -> list[Interrupt]:
        """Cancel the work of all workers; its samples, and those that are left of the update, count as used if read."""
        if self.queue is not None:
            self.queue.use_up()
        busy = list(self._in_flight.items())
        for worker, state in busy:
            self.table.release(worker, state)
            self.iterations.skip(worker)
            if not are_read:
                self.return_minibatch(worker, state)
        return [Interrupt(worker, state.draw) for worker, state in busy]

    def give(self, worker: int, version: int, workload: int, now: float) -> Compute:
        """Assign the next work, on the newest version, to an idle worker."""
        state = self._workers[worker]
        self.table.assign(worker, state, version, now)
        upcoming: tuple[Minibatch, ...] = ()
        if worker in self._dealt:
            state.minibatch = self._dealt.pop(worker)
        elif self.queue is not None:
            state.minibatch = self.queue.take(worker)
        elif self._minibatches is None or (self.iterations.are_several and not self.has_data(worker)):
            state.minibatch = None
        else:
            count = 1 if self._local_steps is None else self._local_steps.budget(state.minibatches)
            state.minibatch = self._minibatches.next(worker, count)
            upcoming = self._minibatches.upcoming(worker)
        fields = worker, version, state.draw, state.minibatch, upcoming, workload, state.accepted
        return tuple.__new__(Compute, fields)  # all in order, as in `Accept.of`

    def probe(self, worker: int, version: int, now: float) -> Compute:
        """Assign work to an excluded worker to measure its time; the gradient is not used."""
        state = self._workers[worker]
        self.table.probe(state, version, now)
        return Compute(worker, version, state.draw)

    def deliver(self, worker: int, state: WorkerState) -> None:
        """Note that a busy worker has delivered a gradient."""
        self.table.release(worker, state)
        if self._ssp_bound is not None and self._ssp_bound.deliver(worker):
            self.is_due = True

    def return_minibatch(self, worker: int, state: WorkerState) -> None:
        """Put the minibatch of a worker's latest work back into the queue."""
        if self.queue is not None:
            self.is_due |= self.queue.give_back(worker)
        elif self._minibatches is not None and state.minibatch is not None:
            self._minibatches.put_back(state.minibatch)
            self.is_due |= self.is_limited

    def accept(self, worker: int, state: WorkerState, draw: int, minibatches: int) -> None:
        """Note that a gradient was accepted, and queue the minibatches that it was not computed from again."""
        state.accepted = draw
        if self._local_steps is not None:
            state.minibatches = minibatches
        elif minibatches:
            return
        if self._minibatches is not None and state.minibatch is not None and state.minibatch.length > minibatches:
            self._minibatches.put_back_unused(state.minibatch.after(minibatches), worker)
            self.is_due |= self.is_limited

    def cancel(self, worker: int, state: WorkerState) -> Interrupt:
        """Cancel the work of a busy worker."""
        self.table.release(worker, state)
        self.iterations.forget(worker)
        self.return_minibatch(worker, state)
        return Interrupt(worker, state.draw)

    def restart(self, worker: int) -> Interrupt:
        """Cancel the work of a busy worker, which is due for new work."""
        self.is_due = True
        return self.cancel(worker, self._workers[worker])

    def cancel_older_than(self, version: float, of: Collection[int] | None = None) -> list[Interrupt]:
        """Cancel work that began with an older version, of these workers or of all."""
        # Work assigned later began with this version or a newer one.
        stale = list(takewhile(lambda flight: flight[1].version < version, self._in_flight.items()))
        return [self.cancel(worker, state) for worker, state in stale if of is None or worker in of]

    def expected_work(self, version: int) -> dict[int, Compute]:
        """Return the work on this version by worker, in their order, if every busy worker delivers."""
        coming = deepcopy(self._minibatches)  # a forecast deals none of them
        work = {}
        # gradients that are summed arrive in the order of workers
        for worker in [*self._idle, *sorted(self._in_flight)]:
            if self.is_limited and coming is not None and not coming.has_next(worker):
                continue
            minibatch = coming.next(worker) if coming is not None else None
            upcoming = coming.upcoming(worker) if coming is not None else ()
            draw = self._workers[worker].draw + 1
            work[worker] = Compute(worker, version, draw, minibatch=minibatch, upcoming=upcoming)
        return work

    @property
    def are_data_used_up(self) -> bool:
        """Whether no minibatch is left for any worker now."""
        return self._minibatches is not None and self._minibatches.are_used_up

    def release_workers_without_data(self) -> None:
        """Take idle workers without a minibatch out of the staleness bound, so that others may start."""
        if self._ssp_bound is not None:
            for worker in self._idle:
                if not self.has_data(worker):
                    self._ssp_bound.leave(worker)

    # --- membership ---------------------------------------------------------------------------------------

    def admit(self, workers: Iterable[int]) -> None:
        """Add workers that are lost, excluded or new."""
        for worker in workers:
            self.table.admit(worker)
            if self._ssp_bound is not None:
                self._ssp_bound.join(worker)
        self._assign_shards()

    def remove(self, worker: int, status: WorkerStatus) -> None:
        """Remove a worker, which gets this status."""
        state = self._workers[worker]
        if state.status is BUSY:
            self.cancel(worker, state)
        if self.queue is not None:
            self.queue.leave(worker)
            self.is_due = True
        self._release_reserve(worker)
        self.iterations.forget(worker)
        self.iterations.waiting.discard(worker)
        self.is_due |= self.iterations.are_several
        self.table.remove(worker, status)
        self._assign_shards()
        if self._ssp_bound is not None and self._ssp_bound.leave(worker):
            self.is_due = True

    def cancel_all(self) -> None:
        """Cancel all work, probes included, and discard what workers have loaded ahead."""
        for worker, state in list(self._in_flight.items()):
            self.cancel(worker, state)
        for worker in self._workers:
            self._release_reserve(worker)
        for state in self._workers.values():
            if state.status is PROBED:
                state.status = EXCLUDED
        self.iterations.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the queue of the update in progress."""
        state = super().state_dict()
        return state if self.queue is None else {**state, "queue": self.queue.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        super().load_state_dict(state)
        self.queue = LeaseQueue.restored(state["queue"]) if "queue" in state else None

    def _release_reserve(self, worker: int) -> None:
        if self._minibatches is not None:
            self._minibatches.release(worker)

    def _assign_shards(self) -> None:
        if self._minibatches is not None:
            self._minibatches.assign_shards(self.table.active())
