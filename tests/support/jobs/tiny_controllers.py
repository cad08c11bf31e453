"""Controllers with a state."""

from typing import ClassVar

import numpy as np

import paceline as pl
from paceline.utils.rng import derived_seed


class RandomWalk(pl.controllers.Controller):
    """Controller that changes the quorum at random, from a seed, and closes a long update."""

    def __init__(self, seed, n):
        self.seed = seed
        self.n = n

    def __repr__(self):
        return f"RandomWalk({self.seed}, {self.n})"

    def begin(self, n):
        return (1, {0: "begun"})

    def decide(self, state, observation):
        k, visited = state
        if observation.trigger == "timer":
            return state, [pl.controllers.CloseUpdate("waited long enough")]
        if observation.trigger != "open":
            return state, []
        k = min(self.n, max(1, k + derived_seed(self.seed, "walk", observation.version) % 3 - 1))
        return (k, {observation.version: "seen", **visited}), [
            pl.controllers.SetQuorum(k, f"walked to {k}"),
            pl.controllers.CallAgainAt(observation.now + 0.7),
        ]


class Replacing(pl.controllers.Controller):
    """Controller that replaces a worker when the update after a version opens."""

    def __init__(self, worker, version):
        self.worker = worker
        self.version = version

    def begin(self, n):
        return None

    def decide(self, state, observation):
        due = observation.trigger == "open" and observation.version == self.version
        return state, [pl.controllers.ReplaceWorker(self.worker)] if due else []


class ChangingShares(pl.controllers.Controller):
    """Controller that sets other shares every five updates, whatever the times."""

    sets_shares: ClassVar[bool] = True

    def begin(self, n):
        return 0

    def decide(self, state, observation):
        if observation.trigger != "open" or state < 5:
            return state + (observation.trigger == "open"), []
        random, size, workers = np.random.default_rng(state // 5), observation.batch_size, sorted(observation.workers)
        total = len(workers) * size
        ends = np.sort(random.choice(np.arange(1, total), len(workers) - 1, replace=False))
        shares = np.diff([0, *ends, total]).tolist()
        return state + 1, [pl.controllers.SetShares(dict(zip(workers, shares, strict=True)), size, f"{shares}")]
