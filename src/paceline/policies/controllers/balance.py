"""Balance: shares of the workers in each update that follow their speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, replace
from itertools import chain
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paceline.errors import UsageError
from paceline.policies.controllers.base import Action, LeaseRule, Observation, SetShares, StatefulController
from paceline.policies.shares import (
    LEAST_GAIN,
    Pieces,
    ShareBalancer,
    ShareDecision,
    cost_of_lease,
    cut_in_leases,
    even,
)
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.state_dict import Stateful, check_numbers

if TYPE_CHECKING:
    from paceline.protocols.protocol import Plan, Protocol

COSTS = 31  # of leases, of which the median counts
Times = dict[int, tuple[int, float]]  # samples and seconds of each worker in an update


class ShareState(Stateful):
    """State of the shares: their policy, and the times of the latest two updates.

    Args:
        n: number of workers at the beginning of the phase.

    Attributes:
        n: as given.
        workers: workers that the policy is of, in its order.
        policy: policy of the shares; None before the first update.
        latest: samples and seconds of each worker in the latest update.
        before: those of the update before it.
        firsts: samples and seconds of the first lease of each worker in the latest update.
        costs: latest costs of a lease in seconds, as two leases of a worker in one update give them.
    """

    _saved = ("n", "workers", "latest", "before", "firsts", "costs")
    _defaults: ClassVar[Mapping[str, Any]] = {"n": 0, "firsts": {}, "costs": []}  # missing in early runs

    def __init__(self, n: int) -> None:
        self.n = n
        self.workers: list[int] = []
        self.policy: ShareBalancer | None = None
        self.latest: Times = {}
        self.before: Times = {}
        self.firsts: Times = {}
        self.costs: list[float] = []

    @property
    def lease_s(self) -> float:
        """Cost of a lease in seconds, whatever its samples; 0 while it is unknown."""
        return max(0.0, median(self.costs)) if self.costs else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with that of the policy and the sizes of its shares."""
        policy = self.policy
        return {**super().state_dict(), "policy": policy and policy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        super().load_state_dict(state)
        check_numbers("costs of a lease", self.costs)
        for part in (self.latest, self.before, self.firsts):
            check_numbers("times of shares", [*part, *chain(*part.values())])
        saved = state["policy"]
        if saved is not None:
            given = {name: saved[name] for name in ("equal", "least_gain") if name in saved}  # missing in early runs
            self.policy = ShareBalancer(len(self.workers), Pieces(**saved["sizes"]), **given)
            self.policy.load_state_dict(saved)

    def follow(
        self, workers: Sequence[int], sizes: Pieces, minibatches: int, least_gain: float = LEAST_GAIN
    ) -> ShareBalancer:
        """Return the policy of these workers, with what is known of those that were there before.

        Args:
            workers: numbers of the workers.
            sizes: sizes of their shares.
            minibatches: number of minibatches whose samples they share.
            least_gain: smallest gain of new shares, >= 0.
        """
        equal = even(minibatches * sizes.batch_size, [True] * len(workers))
        if self.policy is None:
            self.policy = ShareBalancer(len(workers), sizes, equal, least_gain)
        elif self.workers != workers:
            numbers = {worker: number for number, worker in enumerate(self.workers)}
            self.policy = self.policy.for_ranks([numbers.get(worker) for worker in workers], equal)
        self.workers = list(workers)
        return self.policy

    def add(self, worker: int, samples: int, seconds: float) -> None:
        """Add the time of a lease in the update in progress, without the cost that any lease has."""
        cost_s = cost_of_lease(self.firsts.setdefault(worker, (samples, seconds)), (samples, seconds))
        if cost_s is not None:
            self.costs = [*self.costs[1 - COSTS :], cost_s]
        self._count(worker, samples, max(seconds - self.lease_s, seconds / 2))

    def _count(self, worker: int, samples: int, seconds: float) -> None:
        samples_before, seconds_before = self.latest.get(worker, (0, 0.0))
        self.latest[worker] = samples_before + samples, seconds_before + seconds

    def add_cancelled(self, worker: int, samples: int, elapsed_s: float) -> None:
        """Add a cancelled lease as if it had ended then, or later if its worker is known to be slower.

        Else a worker whose leases others always end first would never be known to be slow. A lease that says less than
        those that the worker has ended in this update does not count.
        """
        if self.policy is None or worker not in self.workers:
            return
        samples_ended, seconds_ended = self.latest.get(worker, (0, 0.0))
        if not samples_ended:
            known = self.policy.known[self.workers.index(worker)]
            self._count(worker, samples, max(elapsed_s, known.median * samples if known.values else 0.0))
        elif elapsed_s * samples_ended > seconds_ended * samples:
            self._count(worker, samples, elapsed_s)

    def decide(self, policy: ShareBalancer, *, is_late: bool = True) -> ShareDecision | None:
        """Let the policy decide by the latest update, or by the one before it."""
        if is_late:
            self.before, self.latest = self.latest, self.before
        known = self.latest
        self.latest = {}
        self.firsts = {}
        times = [known.get(worker, (0, 0.0)) for worker in self.workers]
        return policy.decide([samples for samples, _ in times], [seconds for _, seconds in times])


@checked_dataclass(frozen=True, repr=False)
class Balance(StatefulController[ShareState]):
    """Shares by speed: each update has the samples of whole minibatches, and a slow worker computes fewer of them.

    The shares of an update follow from the times of all updates before it; without a queue but the latest one, as in a
    loop whose ranks exchange their times without waiting.

    Args:
        pieces: m, pieces of a minibatch, >= 1; shares differ by whole pieces.
        max_share: largest share as a multiple of a minibatch, >= 1.
        queue: whether a part of the shares that follows the noise of the times is dealt as workers ask for more; else a
            worker has one share in an update.
        repeats: whether a worker that finds no sample left repeats a lease that is under way.
        live: whether an update of a queue has a minibatch of each live worker; else of each worker at the beginning.

    Source: Chen et al., "Semi-dynamic load balancing" (LB-BSP), SoCC 2020: shares predicted from recent speeds. There,
    each worker has one share in an update.
    """

    pieces: int = 8
    max_share: float = 1.5
    _: KW_ONLY
    queue: bool = False
    repeats: bool = True
    live: bool = False

    sets_shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.sizes(1)

    def check(self, protocol: Protocol, n: int) -> None:
        """Check that every update has all samples of whole minibatches."""
        refill: Literal["share", "update"] = "share" if self.queue else "update"
        if protocol.quorum != "all" or protocol.max_staleness or protocol.refill != refill:
            raise UsageError(
                f"{protocol.name}: shares of the samples of an update need updates of one fresh gradient of every "
                f"worker; type balanced(m={self.pieces}{'' if self.queue else ', leases=1'})"
            )

    def sizes(self, batch_size: int) -> Pieces:
        """Return the sizes of shares of minibatches of this number of samples."""
        return Pieces(batch_size, self.pieces, self.max_share)

    def begin(self, n: int) -> ShareState:
        """Return the initial state: no times."""
        return ShareState(n)

    def decide(self, state: ShareState, observation: Observation) -> tuple[ShareState, Sequence[Action]]:
        """Note the time of every gradient, and set the shares when an update opens.

        A queue rests while another controller has a protocol of whole minibatches in force.
        """
        if self.queue and observation.protocol.refill != "share":
            return state, []
        if observation.quorum < inf:
            raise UsageError(
                f"{self} deals all samples of an update, but another controller has it made of {observation.quorum} "
                "gradients; leave one of the two out"
            )
        size = observation.batch_size or self.pieces
        arrival = observation.arrival
        if observation.trigger == "arrival" and arrival is not None and observation.accepted:
            state.add(arrival.worker, round(observation.share * size), observation.busy_s)
        if observation.trigger != "open" or not observation.workers:
            return state, []
        for work in observation.interrupted if self.queue else ():
            state.add_cancelled(work.worker, round(work.share * size), work.elapsed_s)
        workers = sorted(observation.workers)
        minibatches = state.n if self.queue and not self.live else len(workers)
        sizes = self.sizes(size)
        if self.queue:  # a lease is limited, not the share; a change that gains little costs nothing
            policy = state.follow(workers, replace(sizes, max_share=float(minibatches)), minibatches, least_gain=0.0)
        else:
            policy = state.follow(workers, sizes, minibatches)
        decision = state.decide(policy, is_late=not self.queue)
        if not self.queue and set(policy.shares) == {size}:
            return state, []
        reason = f"{', '.join(map(str, policy.shares))} samples: {decision.reason}" if decision else ""
        shares, leases = policy.shares, None
        if self.queue:
            seconds = [each.median for each in policy.known]
            firsts, later = cut_in_leases(policy.shares, sizes, policy.spread(), seconds, state.lease_s)
            shares = tuple(min(each, sizes.most) for each in firsts)
            leases = LeaseRule(minibatches, later, self.repeats)
        return state, [SetShares(dict(zip(workers, shares, strict=True)), size, reason, leases)]


def balances_of(plan: Plan) -> list[Balance]:
    """Return the controllers of the shares in a plan."""
    return [each for phase in plan.phases for each in phase.controllers if isinstance(each, Balance)]
