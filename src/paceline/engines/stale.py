"""What is done about a stale gradient, between its arrival and its being accepted."""

from __future__ import annotations

from math import prod
from sys import float_info

from paceline.coordinator import Coordinator
from paceline.events import Arrival
from paceline.server import ParameterServer
from paceline.vectors import Vectors


def compensated(
    arrival: Arrival,
    coordinator: Coordinator,
    server: ParameterServer,
    version: int,
    then: Vectors,
    gradient: Vectors,
) -> Arrival:
    """Let the compensators act on a gradient if it will be accepted; return its arrival with what they did.

    A correction that overflows makes a gradient that is not finite, and will be dropped as any other.

    Args:
        arrival: about to be told.
        coordinator: knows the compensators, and what will be accepted.
        server: holds the parameters of now.
        version: that the gradient was computed at.
        then: the parameters of that version.
        gradient: may be changed.
    """
    if not will_be_compensated(arrival, coordinator):
        return arrival
    compensators = coordinator.compensators
    staleness = coordinator.version - version
    done, finite = server.compensate(compensators, gradient, then, staleness, arrival.squared_norm)
    scales = [each.factor for each, by in zip(done, compensators, strict=True) if by.kind == "scale"]
    step_scale = max(prod(scales, start=1.0), float_info.min)  # a product may underflow, and weights may not be 0
    return arrival._replace(step_scale=step_scale, compensations=done, finite=finite)


def will_be_compensated(arrival: Arrival, coordinator: Coordinator) -> bool:
    """Return whether there are compensators now, and a gradient for them that will be accepted."""
    return bool(coordinator.compensators) and arrival.finite and coordinator.wants(arrival.worker, arrival.draw)
