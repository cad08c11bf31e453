"""Dynamic stale-synchronous bound: the lead at which the fastest worker waits least for the slowest."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from paceline.errors import UsageError
from paceline.policies.controllers.base import Action, Observation, SetLead, StatefulController
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.state_dict import Stateful
from paceline.utils.validation import check_range


class _State(Stateful):
    """State of a dynamic lead: the times of the latest two gradients of each worker, and the latest worker."""

    _saved = ("times_s", "latest")

    def __init__(self) -> None:
        self.times_s: dict[int, tuple[float, float]] = {}  # of the gradient before the latest, and of the latest
        self.latest = -1

    def observe(self, worker: int, now: float) -> None:
        """Record the time of a gradient."""
        self.times_s[worker] = (self.times_s.get(worker, (now, now))[1], now)
        self.latest = worker


@checked_dataclass(frozen=True, repr=False)
class DynamicLead(StatefulController[_State]):
    """Dynamic lead of DSSP: the fastest worker may get further ahead, if it then waits less for the slowest.

    When the fastest worker has delivered and is more than ``lead`` gradients ahead, it may start r more gradients, up
    to a lead of ``most``. Both workers are assumed to take as long for each gradient as for their latest. r is the
    number after which the fastest worker waits least for the next gradient of the slowest, the smallest such number in
    a tie. If r is 0, it waits until it is ``lead`` gradients ahead.

    Args:
        lead: lead that every worker may have, >= 0.
        most: largest lead, >= lead.

    Source: Zhao, An, Liu, Chen, "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning", ICDCS
    2019, Algorithms 1 and 2.

    Differs from the paper: the larger lead holds for every worker, and r is computed at each gradient of the fastest
    worker; in the paper r is a number of gradients of that worker, and is computed again when they are made.
    """

    lead: int
    most: int

    def __post_init__(self) -> None:
        check_range("[0, inf)", Integral, lead=self.lead, most=self.most)
        if self.most < self.lead:
            raise UsageError(f"most={self.most} is below lead={self.lead}; give most >= lead")

    def begin(self, n: int) -> _State:
        """Return the initial state: no gradients."""
        return _State()

    def decide(self, state: _State, observation: Observation) -> tuple[_State, Sequence[Action]]:
        """Record the time of every gradient, and set the lead when an update opens."""
        if observation.trigger == "arrival" and observation.arrival is not None:
            state.observe(observation.arrival.worker, observation.now)
        leads = observation.leads
        if observation.trigger != "open" or state.latest not in leads:
            return state, []
        state.times_s = {worker: times_s for worker, times_s in state.times_s.items() if worker in leads}
        slowest = min(leads, key=lambda worker: (leads[worker], worker))
        ahead, furthest = leads[state.latest], max(leads.values())
        now = int(observation.protocol.max_lead)
        wanted = now if furthest > self.lead else self.lead
        if ahead == furthest > self.lead:
            more = self._more(state, slowest, ahead)
            wanted = min(self.most, ahead + more - 1) if more else self.lead
        if wanted == now:
            return state, []
        return state, [SetLead(wanted, f"worker {state.latest} is {ahead} gradients ahead of worker {slowest}")]

    def _more(self, state: _State, slowest: int, ahead: int) -> int:
        """Return the number of gradients after which the fastest worker waits least for the slowest."""
        (before_s, now), (slow_before_s, slow_s) = state.times_s[state.latest], state.times_s.get(slowest, (0.0, 0.0))
        own_s, slow_interval_s = now - before_s, slow_s - slow_before_s
        if own_s <= 0 or slow_interval_s <= 0:
            return 0

        def wait_s(gradients: int) -> float:
            """Return the wait for the slowest worker after a number of further gradients."""
            return -(now + gradients * own_s - slow_s) % slow_interval_s

        return min(range(max(self.most - ahead + 1, 0) + 1), key=wait_s)
