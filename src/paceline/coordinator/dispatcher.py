"""Who takes part, and who is given which work."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from itertools import takewhile
from math import inf
from typing import Any

from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.coordinator.ssp_bound import SSPBound
from paceline.coordinator.worker_table import ASIDE, BUSY, PROBED, WorkerState, WorkerStatus, WorkerTable
from paceline.core.events import Compute, Interrupt
from paceline.protocols.protocol import Protocol


class Dispatcher:
    """Gives work to workers, by the rules of the protocol in force, and takes it back.

    Args:
        minibatches: deals out the data; None where the workers draw for themselves.

    Attributes:
        roster: who is there, who is idle, and who is at work on what.
        is_limited: whether the data come to an end.
        is_due: whether an idle worker may have become free to start.
    """

    def __init__(self, minibatches: MinibatchSampler | None) -> None:
        self.roster = WorkerTable()
        self.is_limited = minibatches is not None and minibatches.is_limited
        self.is_due = False
        self._minibatches = minibatches
        self._workers, self._idle, self._in_flight = self.roster.workers, self.roster.idle, self.roster.in_flight
        self._once_an_update = False
        self._lead: SSPBound | None = None

    def follow(self, protocol: Protocol) -> None:
        """Go by the rules of this protocol from here on."""
        self._once_an_update = protocol.refill == "update"
        self._lead = None
        if protocol.max_lead != inf:
            self._lead = SSPBound(protocol.max_lead)
            for worker in self.roster.taking_part():
                self._lead.join(worker)
        self.is_due = True

    # --- work ---------------------------------------------------------------------------------------------

    def may_start(self, worker: int, version: int) -> bool:
        """Return whether an idle worker may begin on this version."""
        if self._once_an_update and self._workers[worker].contributed_to == version:
            return False
        if self.is_limited and not self.has_data(worker):
            return False
        return self._lead is None or self._lead.may_start(worker)

    def has_data(self, worker: int) -> bool:
        """Return whether there is a minibatch for the worker, at the moment."""
        return self._minibatches is None or self._minibatches.has_next(worker)

    def give(self, worker: int, version: int, now: float) -> Compute:
        """Give an idle worker its next work."""
        state = self._workers[worker]
        self.roster.occupy(worker, state, version, now)
        if self._minibatches is not None:
            state.minibatch = self._minibatches.next(worker)
        return Compute(worker, version, state.draw, state.minibatch)

    def probe(self, worker: int, version: int, now: float) -> Compute:
        """Give a worker that was set aside work that nobody waits for."""
        state = self._workers[worker]
        self.roster.probe(state, version, now)
        return Compute(worker, version, state.draw)

    def deliver(self, worker: int, state: WorkerState) -> None:
        """Note that a worker at work has delivered."""
        self.roster.release(worker, state)
        if self._lead is not None and self._lead.deliver(worker):
            self.is_due = True

    def give_back(self, state: WorkerState) -> None:
        """Let the minibatch of a worker's latest work be dealt out again."""
        if self._minibatches is not None and state.minibatch is not None:
            self._minibatches.give_back(state.minibatch)
            self.is_due |= self.is_limited

    def abandon(self, worker: int, state: WorkerState) -> Interrupt:
        """Take back what a worker is working on."""
        self.roster.release(worker, state)
        self.give_back(state)
        return Interrupt(worker, state.draw)

    def abandon_older_than(self, version: float, of: Collection[int] | None = None) -> list[Interrupt]:
        """Take back the work that began with a version before this one, of these workers or of all."""
        # Who was given work later is on this version or a newer one.
        stale = list(takewhile(lambda flight: flight[1].version < version, self._in_flight.items()))
        return [self.abandon(worker, state) for worker, state in stale if of is None or worker in of]

    def ahead(self, version: int) -> dict[int, Compute]:
        """Return the work on this version if everybody at work delivers, in the order of the workers, by worker."""
        coming = deepcopy(self._minibatches)
        work = {}
        for worker in [*self._idle, *sorted(self._in_flight)]:
            if self.is_limited and coming is not None and not coming.has_next(worker):
                continue
            minibatch = coming.next(worker) if coming is not None else None
            work[worker] = Compute(worker, version, self._workers[worker].draw + 1, minibatch)
        return work

    @property
    def are_data_used_up(self) -> bool:
        """Whether there is no minibatch left for anybody, at the moment."""
        return self._minibatches is not None and self._minibatches.are_used_up

    def release_from_those_without_data(self) -> None:
        """Let nobody stay behind for a worker that has no minibatch to begin with."""
        if self._lead is not None:
            for worker in self._idle:
                if not self.has_data(worker):
                    self._lead.leave(worker)

    # --- membership ---------------------------------------------------------------------------------------

    def enlist(self, workers: Iterable[int]) -> None:
        """Let workers take part that do not."""
        for worker in workers:
            self.roster.enlist(worker)
            if self._lead is not None:
                self._lead.join(worker)
        self._deal_out()

    def take_out(self, worker: int, status: WorkerStatus) -> None:
        """Let a worker no longer take part."""
        state = self._workers[worker]
        if state.status is BUSY:
            self.abandon(worker, state)
        self.roster.strike(worker, status)
        self._deal_out()
        if self._lead is not None and self._lead.leave(worker):
            self.is_due = True

    def stop_all(self) -> None:
        """Take back all work: nobody remembers any."""
        for worker, state in list(self._in_flight.items()):
            self.abandon(worker, state)
        for state in self._workers.values():
            if state.status is PROBED:
                state.status = ASIDE

    def _deal_out(self) -> None:
        if self._minibatches is not None:
            self._minibatches.deal_out(self.roster.taking_part())

    # --- going on -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the protocol."""
        return {
            "is_limited": self.is_limited,
            "is_due": self.is_due,
            "roster": self.roster.state_dict(),
            "minibatches": self._minibatches and self._minibatches.state_dict(),
            "lead": self._lead and self._lead.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], protocol: Protocol) -> None:
        """Go on from such a state under the protocol that was in force."""
        self.follow(protocol)
        self.is_due = state["is_due"]
        self.roster.load_state_dict(state["roster"])
        if self._minibatches is not None:
            self._minibatches.load_state_dict(state["minibatches"])
        if self._lead is not None:
            self._lead.load_state_dict(state["lead"])
