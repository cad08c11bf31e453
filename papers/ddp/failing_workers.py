"""Simulated workers that fail at random times and come back, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.distributions import Distribution
from paceline.core import events
from paceline.engines.virtual.timing import TimedWorkers
from paceline.utils.rng import stream


class Failure(NamedTuple):
    """Failure of a worker; if that one is away, of the next one that is not."""

    at_s: float
    worker: int


def failures(between: Distribution, n: int, seed: int) -> Iterator[Failure]:
    """Yield the failures of a cluster without end.

    Args:
        between: distribution of the seconds between two failures of any of the workers.
        n: number of workers.
        seed: seed of the failures, >= 0.
    """
    random = stream(seed, "failures")
    at_s = 0.0
    while True:
        at_s += float(between.quantile(random.random(1))[0])
        yield Failure(at_s, int(random.integers(n)))


class Recovery(NamedTuple):
    """What a failure costs the others, in seconds, >= 0.

    Attributes:
        away_s: from a failure until the worker is back.
        loss_s: pause of all others at a failure.
        return_s: pause of all others when the worker is back.
    """

    away_s: float
    loss_s: float = 0.0
    return_s: float = 0.0


class FailingWorkers(TimedWorkers):
    """Simulated workers that fail at given times; a scripted `Fault` has a draw, which may be interrupted.

    Args:
        cluster: workers and their times.
        seed: seed of the times, >= 0.
        failures: failures in the order of their times, without end.
        recovery: what a failure costs.
    """

    def __init__(self, cluster: Cluster, seed: int, failures: Iterator[Failure], recovery: Recovery) -> None:
        super().__init__(cluster, seed)
        self._failures = failures
        self._recovery = recovery
        self._away: set[int] = set()
        self._await_failure()

    def next_event(self, on_idle: Callable[[], None]) -> events.Event:
        """Return the earliest event, with the worker that is lost; the server is busy while all others pause."""
        event = super().next_event(on_idle)
        match event:
            case events.Lost():
                worker = self._live_worker(event.worker)
                self._away.add(worker)
                self._current[worker] = 0  # its gradient does not arrive
                self._at(self.now + self._recovery.away_s, events.Joined(self.now, worker))
                self._await_failure()
                self.now += self._recovery.loss_s
                return events.Lost(self.now, worker, event.reason)
            case events.Joined():
                self._away.remove(event.worker)
                self.now += self._recovery.return_s
                return events.Joined(self.now, event.worker)
        return event

    def _await_failure(self) -> None:
        failure = next(self._failures)
        self._at(failure.at_s, events.Lost(failure.at_s, failure.worker, "it has failed"))

    def _live_worker(self, first: int) -> int:
        n = len(self._current)
        return min(set(range(n)) - self._away, key=lambda worker: (worker - first) % n)
