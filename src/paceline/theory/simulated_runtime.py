"""Simulated seconds per update, where theory has only bounds or nothing."""

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush

from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.distributions import Distribution
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Arrival, Command, Compute
from paceline.core.stop import Stop
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import Protocol, as_plan
from paceline.theory.assumptions import NoTheoryError, protocol_family, round_trip
from paceline.theory.runtime import Expected, expected
from paceline.utils.rng import stream

GRADIENTS = 20_000
LEAST_UPDATES = 500
BLOCK = 1000  # times that are drawn at once


def expected_or_simulated(protocol: Protocol, cluster: Cluster) -> Expected:
    """Return the expected seconds per update; simulated where `expected` has only bounds, or no theory for the times.

    Args:
        protocol: protocol of a family that the theory covers.
        cluster: simulated cluster of identical workers.

    Raises:
        NoTheoryError: the theory covers neither the protocol nor the cluster.
        UsageError: the expectation is infinite.
    """
    known, times = protocol_family(protocol, cluster.n), round_trip(cluster)
    try:
        bounds = expected(protocol, cluster)
    except NoTheoryError:
        bounds = None
    if bounds is not None and bounds.kind != "upper bound":
        return bounds
    updates = max(LEAST_UPDATES, GRADIENTS // known.k)
    seconds = _seconds_per_update(protocol, cluster.n, times, updates)
    source = f"{updates} updates"
    if bounds is None:
        return Expected(
            seconds_per_update=seconds, kind="simulated", source=source, lower_s=seconds, upper_s=seconds, k=known.k
        )
    return replace(bounds, seconds_per_update=seconds, kind="simulated", source=source)


def _seconds_per_update(protocol: Protocol, n: int, times: Distribution, updates: int) -> float:
    """Return the mean seconds of an update of n workers, by the rules of the coordinator."""
    plan = checked_plan(as_plan(protocol), n, total=None, per_epoch=None)
    coordinator = Coordinator(plan, workers=n, stop=Stop(updates=updates))
    next_s = _samples(times)
    now, arriving = 0.0, list[tuple[float, int, int]]()
    commands: list[Command] = coordinator.begin()
    while not coordinator.stopped:
        for command in commands:
            if isinstance(command, Compute):
                heappush(arriving, (now + next(next_s), command.worker, command.draw))
        now, worker, draw = heappop(arriving)  # the coordinator drops a gradient of interrupted work
        commands = coordinator.handle(Arrival(now, worker, draw))
    return now / coordinator.version


def _samples(times: Distribution) -> Iterator[float]:
    uniform = stream(0, "simulated runtime")
    while True:
        yield from times.quantile(uniform.random(BLOCK)).tolist()
