"""Arrivals of gradients, given by what was measured of them."""

from paceline.core.events import Arrival
from paceline.core.gradient import NOT_MEASURED, Measured


def arrival(now, worker, draw, **given):
    """Return an arrival; what is not given was not measured."""
    measured = {name: given.pop(name) for name in Measured._fields if name in given}
    return Arrival(now, worker, draw, NOT_MEASURED._replace(**measured), **given)
