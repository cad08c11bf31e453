"""User-defined law, controller and compensator, typed with public names alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import paceline as pl


class Constant:
    @property
    def expectation_s(self) -> float:
        return 2.0

    def quantile(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.full_like(u, 2.0)


class Half(pl.controllers.Controller[None]):
    def begin(self, n: int) -> None:
        return None

    def decide(
        self, state: None, observation: pl.controllers.Observation
    ) -> tuple[None, Sequence[pl.controllers.Action]]:
        return None, [pl.controllers.SetQuorum(2, "half of four")] if observation.trigger == "open" else []


@dataclass(frozen=True, repr=False)
class Damped(pl.plans.Compensator):
    by: float
    name: ClassVar[str] = "damped"
    kind: ClassVar[Literal["scale", "correction"]] = "scale"

    @property
    def formula(self) -> str:
        return "1/(1+by*tau)"

    def compensate(self, stale: pl.plans.StaleGradient, memory: dict[str, list[Tensor]]) -> float:
        return 1 / (1 + self.by * stale.staleness)


law: pl.timing.Distribution = Constant()
simulated = pl.simulate(pl.bsp() + Half(), pl.Cluster(4, timing=law), updates=5)
print(simulated.totals.mean_k)
job = pl.jobs.digits()
print(pl.train(job, protocol=pl.asp() + Damped(0.5), cluster=pl.Cluster(2), stop="updates=9").stopped_by)
