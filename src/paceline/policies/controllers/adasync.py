"""AdaSync: a quorum that grows as the loss falls."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan, sqrt
from numbers import Integral
from typing import Any, ClassVar, Literal

from paceline.errors import UsageError
from paceline.policies.controllers.base import Action, Controller, Observation, SetQuorum
from paceline.protocols.protocol import Protocol
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.validation import check_range
from paceline.utils.wording import counted

State = dict[str, Any]


@checked_dataclass(frozen=True, repr=False)
class AdaSync(Controller[State]):
    """AdaSync quorum: K grows as the loss F falls from its initial value F_0.

    If an update takes at most one gradient from each worker (K-sync, K-async), K is the positive root of

        K^2 + c K - c P = 0,    c = K_0^2 F_0 / ((P - K_0) F).

    It starts at K_0 and tends to P, the number of live workers. Otherwise (K-batch-sync, K-batch-async)

        K = K_0 sqrt(F_0 / F).

    Args:
        K_0: quorum of the first update, >= 1; below the number of workers for K-sync and K-async.
        D: number of updates over which F is averaged, >= 1; F_0 is the loss of the first update.

    Source: Dutta, Wang, Joshi, "Slow and stale gradients can win the race", 2020 (arXiv:2003.10579), App. D.1.

    Differs from the paper: K is computed at every update instead of at the ends of time windows, as in the comparison
    of Xu et al. 2020 (DBW), Sect. 4.4, and rounded to the nearest whole number. If a loss is not positive, the quorum
    is P.
    """

    K_0: int = 1
    D: int = 5

    reads: ClassVar[Literal["losses"]] = "losses"

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, K_0=self.K_0, D=self.D)

    def check(self, protocol: Protocol, n: int) -> None:
        """Refuse K_0 >= n where an update takes one gradient from each worker, because K could not grow."""
        if protocol.refill == "update" and n <= self.K_0:
            raise UsageError(
                f"adasync: K_0={self.K_0} with {counted(n, 'worker')} leaves no room to grow; "
                f"give K_0 < {n}, or a protocol that refills on arrival, for example base=k_batch_sync"
            )

    def begin(self, n: int) -> State:
        """Return the initial state: no losses."""
        return {"first": nan, "latest": [], "open": []}

    def decide(self, state: State, observation: Observation) -> tuple[State, Sequence[Action]]:
        """Record the loss of each accepted gradient, and set K when an update opens."""
        if observation.accepted and observation.arrival is not None:
            loss = observation.arrival.measured.loss
            if isfinite(loss):
                state["open"].append(loss)
        if observation.trigger != "open":
            return state, []
        if state["open"]:
            loss = sum(state["open"]) / len(state["open"])
            state["latest"] = [*state["latest"], loss][-self.D :]
            state["open"] = []
            if not isfinite(state["first"]):
                state["first"] = loss
        if not state["latest"]:
            return state, [SetQuorum(self.K_0, "K_0, until the first loss is known")]
        F_0, F = state["first"], sum(state["latest"]) / len(state["latest"])
        K = self.quorum(F_0, F, observation)
        return state, [SetQuorum(K, f"loss {F:.4g}, at first {F_0:.4g}")]

    def quorum(self, F_0: float, F: float, observation: Observation) -> int:
        """Return K for the initial loss F_0 and the current loss F."""
        P = max(observation.live, 1)
        if F_0 <= 0 or F <= 0:
            return P
        if observation.protocol.refill == "arrival":
            return max(1, round(self.K_0 * (sqrt(F_0) / sqrt(F))))
        if self.K_0 >= P:
            return P
        # The root (sqrt(c^2 + 4 c P) - c) / 2, without the cancellation for large c.
        P_by_c = P * (P - self.K_0) / self.K_0**2 * (F / F_0)
        return min(P, max(1, round(2 * P / (1 + sqrt(1 + 4 * P_by_c)))))
