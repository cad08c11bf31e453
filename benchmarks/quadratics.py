"""Noisy quadratics: a job whose loss is exact, for many runs of the rules of learning rates and protocols.

    F(x) = 1/2 sum_i h_i x_i^2,    gradient of a minibatch = h x + noise,    all x_i = 1 at the start,

with the eigenvalues h_i from 1 / 1000 to 1 and independent normal noise of the same variance in every direction. The
noise level is the standard deviation of the whole gradient over the norm of the first gradient of F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from paceline.coordinator.coordinator import Coordinator
from paceline.core import events
from paceline.engines.virtual.times_only import TimesOnly
from paceline.engines.virtual.timing import TimedWorkers

DIMENSIONS = 32
CONDITION = 1000
TARGET = 1e-3  # of the first loss
REPLICAS = 16
BATCH = 8  # samples of a minibatch


@dataclass(frozen=True)
class Quadratic:
    """Noisy quadratic.

    Attributes:
        spectrum: "log" for eigenvalues evenly spaced in their logarithm, "square" for those of (i / d)^2.
        noise: noise level, >= 0.
    """

    spectrum: str
    noise: float

    @cached_property
    def h(self) -> np.ndarray:
        """Eigenvalues, from 1 / CONDITION to 1."""
        if self.spectrum == "log":
            return np.geomspace(1 / CONDITION, 1, DIMENSIONS)
        return np.maximum((np.arange(1, DIMENSIONS + 1) / DIMENSIONS) ** 2, 1 / CONDITION)

    @cached_property
    def sigma(self) -> float:
        """Standard deviation of the noise in each direction."""
        return float(self.noise * np.linalg.norm(self.h) / sqrt(DIMENSIONS))

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Return F(x)."""
        return np.asarray(0.5 * np.square(x) @ self.h)

    @cached_property
    def target(self) -> float:
        """Loss to reach."""
        return float(TARGET * self.loss(np.ones(DIMENSIONS)))


class Update(NamedTuple):
    """Update of a schedule.

    Attributes:
        at_s: time, in seconds.
        stalenesses: staleness of each gradient, in versions.
    """

    at_s: float
    stalenesses: tuple[int, ...]


def tuned_time(
    problem: Quadratic, schedule: Sequence[Update], rates: Sequence[float], seed: int, longest_s: float = inf
) -> tuple[float, float]:
    """Return the time to the target at the best of these rates, and that rate; inf if none reaches it.

    Args:
        problem: quadratic.
        schedule: updates.
        rates: learning rates, rising.
        seed: seed of the noise.
        longest_s: seconds after which no rate is waited for, > 0.
    """
    rng = np.random.default_rng(seed)
    depth = 1 + max(max(each.stalenesses) for each in schedule)
    rate = np.asarray(rates)[:, None, None]
    x = np.ones((len(rates), REPLICAS, DIMENSIONS))
    versions = np.ones((depth, *x.shape))
    reached = np.full(len(rates), inf)
    with np.errstate(over="ignore", invalid="ignore"):
        for i, (at_s, stalenesses) in enumerate(schedule):
            if at_s > longest_s:
                break
            versions[i % depth] = x
            at = [(i - staleness) % depth for staleness in stalenesses]
            mean = versions[at[0]] if len(set(at)) == 1 else np.mean(versions[at], axis=0)
            noise = rng.standard_normal((REPLICAS, DIMENSIONS)) * (problem.sigma / sqrt(len(at)))
            x = x - rate * (problem.h * mean + noise)
            hits = (problem.loss(x).mean(axis=1) <= problem.target) & (reached == inf)
            if hits.any():
                reached[hits] = at_s
                break  # later hits are of slower rates
    best = int(np.argmin(reached))
    return float(reached[best]), float(rates[best])


class Quadratics(TimesOnly):
    """Parameters of a simulation that are those of a noisy quadratic.

    Args:
        workers: simulated workers.
        count: number of workers.
        problem: quadratic.
        rate: learning rate of the optimizer.
        noise_seed: seed of the noise.
        exact_loss: whether workers report F instead of the loss of their minibatch, F + noise . x.

    Attributes:
        losses: time and F of each version.
    """

    def __init__(
        self,
        workers: TimedWorkers,
        count: int,
        problem: Quadratic,
        rate: float,
        noise_seed: int,
        exact_loss: bool = False,
    ) -> None:
        self._timed = workers
        self._problem = problem
        self._rate = rate
        self._rng = np.random.default_rng(noise_seed)
        self._exact = exact_loss
        self._x = np.ones(DIMENSIONS)
        self._read = [self._x] * count
        self._share = [1.0] * count  # of a minibatch, of the task of each worker
        self._last = self._x
        self._held: list[np.ndarray] = []
        self._weights: list[float] = []
        self.losses: list[tuple[float, float]] = [(0.0, float(problem.loss(self._x)))]

    def assigned(self, command: events.Compute) -> None:
        """Begin a gradient at the current version."""
        self._read[command.worker] = self._x
        self._share[command.worker] = 1.0 if command.minibatch is None else command.minibatch.share

    def arrived(self, arrival: events.Arrival, coordinator: Coordinator) -> events.Arrival:
        """Return the arrival with the loss and the norm of its gradient."""
        x, problem, share = self._read[arrival.worker], self._problem, self._share[arrival.worker]
        half = self._rng.standard_normal((2, DIMENSIONS)) * (problem.sigma * sqrt(2 / share))
        noise = half.mean(axis=0)
        self._last = problem.h * x + noise
        loss = float(problem.loss(x)) + (0.0 if self._exact else float(noise @ x))
        between = float(np.square(half[0] - half[1]).sum()) / 4  # two microbatches
        squared_norm = float(self._last @ self._last)
        measured = arrival.measured._replace(
            loss=loss, squared_norm=squared_norm, variance=between, samples=round(BATCH * share)
        )
        return arrival._replace(measured=measured)

    def accept(self, command: events.Accept) -> None:
        """Hold the gradient."""
        self._held.append(self._last)
        self._weights.append(command.weight)

    def apply(self, command: events.Apply) -> events.Step | None:
        """Step."""
        mean = np.average(self._held, axis=0, weights=self._weights)
        self._held.clear()
        self._weights.clear()
        rate = self._rate * command.lr_scale * command.step_scale
        self._x = self._x - rate * mean
        norm = float(mean @ mean)
        self.losses.append((self._timed.now, float(self._problem.loss(self._x))))
        if not command.measure:
            return None
        return events.Step(
            squared_norm=norm,
            progress=rate * norm,
            squared_step=rate * rate * norm,
            learning_rate=rate,
            next_learning_rate=self._rate,
        )
