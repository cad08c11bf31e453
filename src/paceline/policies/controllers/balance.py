"""Balance: shares of the workers in each update that follow their speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.errors import UsageError
from paceline.policies.controllers.base import Action, Observation, SetShares, StatefulController
from paceline.policies.shares import Pieces, ShareBalancer, ShareDecision
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.state_dict import Stateful

if TYPE_CHECKING:
    from paceline.protocols.protocol import Protocol

Times = dict[int, tuple[int, float]]  # samples and seconds of each worker in an update


class ShareState(Stateful):
    """State of the shares: their policy, and the times of the latest two updates.

    Attributes:
        workers: workers that the policy is of, in its order.
        policy: policy of the shares; None before the first update.
        latest: samples and seconds of each worker in the latest update.
        before: those of the update before it.
    """

    _saved = ("workers", "latest", "before")

    def __init__(self) -> None:
        self.workers: list[int] = []
        self.policy: ShareBalancer | None = None
        self.latest: Times = {}
        self.before: Times = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with that of the policy and the sizes of its shares."""
        policy = self.policy
        return {**super().state_dict(), "policy": policy and policy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        super().load_state_dict(state)
        saved = state["policy"]
        if saved is not None:
            self.policy = ShareBalancer(len(self.workers), Pieces(**saved["sizes"]))
            self.policy.load_state_dict(saved)

    def follow(self, workers: Sequence[int], sizes: Pieces) -> ShareBalancer:
        """Return the policy of these workers, with what is known of those that were there before."""
        if self.policy is None:
            self.policy = ShareBalancer(len(workers), sizes)
        elif self.workers != workers:
            numbers = {worker: number for number, worker in enumerate(self.workers)}
            self.policy = self.policy.for_ranks([numbers.get(worker) for worker in workers])
        self.workers = list(workers)
        return self.policy

    def decide(self, policy: ShareBalancer) -> ShareDecision | None:
        """Let the policy decide by the update before the latest one, which is the latest one in the next call."""
        times = [self.before.get(worker, (0, 0.0)) for worker in self.workers]
        self.before, self.latest = self.latest, {}
        return policy.decide([samples for samples, _ in times], [seconds for _, seconds in times])


@checked_dataclass(frozen=True, repr=False)
class Balance(StatefulController[ShareState]):
    """Shares by speed: each update has the samples of whole minibatches, and a slow worker computes fewer of them.

    The shares of an update follow from the times of all updates but the latest one, as in a loop whose ranks exchange
    their times without waiting.

    Args:
        pieces: m, pieces of a minibatch, >= 1; shares differ by whole pieces.
        max_share: largest share as a multiple of a minibatch, >= 1.

    Source: Chen et al., "Semi-dynamic load balancing" (LB-BSP), SoCC 2020: shares predicted from recent speeds.
    """

    pieces: int = 8
    max_share: float = 1.5

    sets_shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.sizes(1)

    def check(self, protocol: Protocol, n: int) -> None:
        """Check that every update waits for all workers."""
        if protocol.quorum != "all" or protocol.max_staleness or protocol.refill != "update":
            raise UsageError(
                f"{protocol.name}: shares of the samples of an update need updates of one fresh gradient of every "
                "worker; type balanced(m=8, leases=1)"
            )

    def sizes(self, batch_size: int) -> Pieces:
        """Return the sizes of shares of minibatches of this number of samples."""
        return Pieces(batch_size, self.pieces, self.max_share)

    def begin(self, n: int) -> ShareState:
        """Return the initial state: no times."""
        return ShareState()

    def decide(self, state: ShareState, observation: Observation) -> tuple[ShareState, Sequence[Action]]:
        """Note the time of every gradient, and set the shares when an update opens."""
        if observation.quorum < inf:
            raise UsageError(
                f"{self} deals all samples of an update, but another controller has it made of {observation.quorum} "
                "gradients; leave one of the two out"
            )
        size = observation.batch_size or self.pieces
        arrival = observation.arrival
        if observation.trigger == "arrival" and arrival is not None and observation.accepted:
            state.latest[arrival.worker] = round(observation.share * size), observation.busy_s
        if observation.trigger != "open":
            return state, []
        workers = sorted(observation.workers)
        policy = state.follow(workers, self.sizes(size))
        decision = state.decide(policy)
        if set(policy.shares) == {size}:
            return state, []
        reason = f"{', '.join(map(str, policy.shares))} samples: {decision.reason}" if decision else ""
        return state, [SetShares(dict(zip(workers, policy.shares, strict=True)), size, reason)]
