"""AdaSync: wait for more gradients as the loss falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from numbers import Integral
from typing import Any, ClassVar, Literal

from paceline.errors import UsageError
from paceline.policies.controllers.base import Action, Controller, Observation, SetQuorum
from paceline.protocols.protocol import Protocol
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_range
from paceline.utils.wording import counted

State = dict[str, Any]


@checked_types
@dataclass(frozen=True, repr=False)
class AdaSync(Controller[State]):
    """Waits for K gradients, a number that grows as the loss F falls from what it was at first, F_0.

    Where a worker gives at most one gradient to an update (K-sync, K-async), K is the positive root of

        K^2 + c K - c P = 0,    c = K_0^2 F_0 / ((P - K_0) F),

    which is K_0 at first and tends to the P live workers; elsewhere (K-batch-sync, K-batch-async)

        K = K_0 sqrt(F_0 / F).

    Args:
        K_0: gradients of the first update, >= 1, and fewer than the workers in the first case.
        D: updates that F is the mean loss of, >= 1; F_0 is the loss of the first update.

    Source: Dutta, Wang, Joshi, "Slow and stale gradients can win the race", 2020 (arXiv:2003.10579), App. D.1.

    Differs from the paper: K is looked at in every update, and not at the ends of windows of time, as DBW's authors do
    in their comparison (Xu et al. 2020, Sect. 4.4); it is rounded to the nearest whole number. A loss that is not
    positive has no ratio to another; all live workers are waited for then.
    """

    K_0: int = 1
    D: int = 5

    reads: ClassVar[Literal["losses"]] = "losses"

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, K_0=self.K_0, D=self.D)

    def __repr__(self) -> str:
        return short_repr(self)

    def check(self, protocol: Protocol, n: int) -> None:
        """Refuse to begin with all workers, where K could not grow."""
        if protocol.refill == "update" and n <= self.K_0:
            raise UsageError(
                f"adasync: K_0 = {self.K_0} of {counted(n, 'worker')} cannot grow; "
                f"give K_0 < {n}, or a protocol that refills on "
                "arrival, as base=k_batch_sync"
            )

    def begin(self, n: int) -> State:
        """Know nothing yet."""
        return {"first": nan, "latest": [], "open": []}

    def decide(self, state: State, moment: Observation) -> tuple[State, Sequence[Action]]:
        """Take in every loss, and choose K when an update opens."""
        if moment.accepted and moment.arrival is not None and isfinite(moment.arrival.loss):
            state["open"].append(moment.arrival.loss)
        if moment.asked != "open":
            return state, []
        if state["open"]:
            loss = sum(state["open"]) / len(state["open"])
            state["latest"] = [*state["latest"], loss][-self.D :]
            state["open"] = []
            if not isfinite(state["first"]):
                state["first"] = loss
        if not state["latest"]:
            return state, [SetQuorum(self.K_0, "K_0, as long as no loss is known")]
        F_0, F = state["first"], sum(state["latest"]) / len(state["latest"])
        K = self.quorum(F_0, F, moment)
        return state, [SetQuorum(K, f"loss {F:.4g}, at first {F_0:.4g}")]

    def quorum(self, F_0: float, F: float, moment: Observation) -> int:
        """Return K for the losses at first and now."""
        P = max(moment.live, 1)
        if F_0 <= 0 or F <= 0:
            return P
        if moment.protocol.refill == "arrival":
            return max(1, round(self.K_0 * (sqrt(F_0) / sqrt(F))))
        if self.K_0 >= P:
            return P
        # The root (sqrt(c^2 + 4 c P) - c) / 2 in a form that does not lose its digits where c is large.
        P_by_c = P * (P - self.K_0) / self.K_0**2 * (F / F_0)
        return min(P, max(1, round(2 * P / (1 + sqrt(1 + 4 * P_by_c)))))
