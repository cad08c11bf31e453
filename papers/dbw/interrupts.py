"""Times of updates under Push & Interrupt: estimates from pooled samples and by (h, k), from the same arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import paceline as pl
from paceline.policies.controllers.base import Action
from paceline.policies.controllers.update_times import UpdateTimes
from paceline.policies.estimators.dbw.isotonic import Floats
from paceline.policies.estimators.dbw.update_time import UpdateTimeEstimator
from paceline.theory import expected
from papers.dbw.jobs import make_job
from papers.dbw.settings import N, cluster
from papers.store import Line
from papers.tasks import Where, unbroken

ALPHAS = (1, 0.7, 0.2)
SEEDS = {"random": 20, "b_dbw": 20, "dbw": 3}  # by rule that chooses k; DBW trains on MNIST
UPDATES = 60

Estimators = dict[str, UpdateTimes]


@dataclass(frozen=True)
class Watch(pl.controllers.Controller[Estimators]):
    """Controller that records both estimates at each update, and changes nothing.

    Args:
        said: estimates after each update, by estimator.
    """

    said: dict[str, list[Floats]] = field(default_factory=dict)

    def begin(self, n: int) -> Estimators:
        """Start without measurements."""
        return {
            name: UpdateTimes(n, UpdateTimeEstimator(n), late=True, pooled=name == "pooled")
            for name in ("by h", "pooled")
        }

    def decide(self, state: Estimators, observation: pl.controllers.Observation) -> tuple[Estimators, Sequence[Action]]:
        """Add the samples of an arrival, and record the estimates when an update opens."""
        for name, times in state.items():
            if observation.trigger == "arrival":
                times.observe(observation)
            if observation.trigger == "open":
                if observation.version:
                    self.said.setdefault(name, []).append(times.durations.estimate().times)
                times.open_round(observation)
        return state, []


@dataclass(frozen=True)
class Interrupted:
    """Task: one run of `k_sync`, whose k is random, or chosen by B-DBW or DBW."""

    alpha: float
    choice: str
    seed: int

    def asked(self) -> Line:
        """Return the fields as plain JSON."""
        return {
            "figure": "interrupts",
            "case": f"alpha={self.alpha:g}",
            "series": self.choice,
            "cluster": str(cluster(self.alpha)),
            "updates": UPDATES,
            "seed": self.seed,
        }

    def carry_out(self, where: Where) -> Line:
        """Return the mean relative error of T_k over all k and updates, by estimator."""
        watch, workers = Watch(), cluster(self.alpha)
        phase = pl.plans.Phase(pl.k_sync(k=1), controllers=(self._controller(), watch))
        updates = where.updates or UPDATES
        if self.choice == "dbw":
            job = make_job("mnist", 500, 0.08, "constant", where.folder)
            on_device = replace(workers, device=where.device)
            unbroken(pl.train(job, protocol=phase, cluster=on_device, stop=pl.Stop(updates=updates), seed=self.seed))
        else:
            pl.simulate(phase, workers, updates=updates, seed=self.seed)
        truth_s = [expected(pl.k_sync(k), workers).seconds_per_update for k in range(1, N + 1)]
        errors = {name: np.abs(np.array(said) / np.array(truth_s) - 1).mean() for name, said in watch.said.items()}
        return {"error": {name: round(float(error), 4) for name, error in errors.items()}}

    def _controller(self) -> pl.controllers.Controller[Any]:
        if self.choice == "random":
            ks = np.random.default_rng(self.seed).integers(1, N + 1, size=UPDATES + 1).tolist()
            return pl.controllers.ScheduledQuorum(dict(enumerate(ks)))
        return pl.controllers.BDBW() if self.choice == "b_dbw" else pl.controllers.DBW()
