"""Which of the protocols of the theory five knobs are."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from paceline.protocols import Phase, Plan, Protocol, as_plan
from paceline.theory.round_trip import NoTheoryError

Name = Literal["k_sync", "k_batch_sync", "k_async", "k_batch_async", "backup", "pull"]


@dataclass(frozen=True)
class Recognised:
    """A protocol of the theory, on n workers.

    Attributes:
        name: of the family; K = n makes `k_sync` fully synchronous, K = 1 makes `k_batch_async` fully asynchronous.
            `backup` and `pull` are K-sync and K-batch-sync whose workers finish stale work.
        k: gradients of an update.
    """

    name: Name
    k: int

    @property
    def is_fresh(self) -> bool:
        """Whether every gradient is of the newest version."""
        return self.name in {"k_sync", "k_batch_sync", "backup", "pull"}


def recognise(protocol: Protocol | Phase | Plan, n: int) -> Recognised:
    """Return which protocol of the theory this is on n workers.

    Where everybody is waited for nobody is late, so that all protocols of one gradient a worker are `k_sync`; where
    one is waited for nobody waits, so that `k_async` is `k_batch_async`. All-reduce of gradients is `k_sync`, too, of
    round trips that end with the sum.

    Raises:
        NoTheoryError: it is none of them.
        UsageError: n workers can never fill its quorum.

    >>> from paceline.catalogue import bsp, k_async
    >>> recognise(bsp(), n=8), recognise(k_async(k=1), n=8)
    (Recognised(name='k_sync', k=8), Recognised(name='k_batch_async', k=1))
    """
    knobs = _alone(protocol)
    _check_reduction(as_plan(protocol))
    knobs.check_workers(n)
    k = n if knobs.quorum == "all" else knobs.quorum
    if knobs.refill == "update" and k == n:
        return Recognised("k_sync", k)
    if knobs.max_lead == inf and not (knobs.quorum == "all" and knobs.refill == "arrival"):
        if knobs.max_staleness == 0 and knobs.on_update == "interrupt":
            return Recognised("k_sync" if knobs.refill == "update" else "k_batch_sync", k)
        if knobs.max_staleness == 0:
            return Recognised("backup" if knobs.refill == "update" else "pull", k)
        if knobs.max_staleness == inf:
            return Recognised("k_async" if knobs.refill == "update" and k > 1 else "k_batch_async", k)
    raise NoTheoryError(knobs.name)


def _check_reduction(plan: Plan) -> None:
    if plan.reduction is not None and plan.reduction.sums != "gradients":
        raise NoTheoryError(f"{plan}, whose workers step for themselves")


def _alone(protocol: Protocol | Phase | Plan) -> Protocol:
    plan = as_plan(protocol)
    if len(plan.phases) > 1 or plan.phases[0].controllers:
        raise NoTheoryError(f"{plan}, whose knobs change")
    return plan.phases[0].protocol
