"""Whether the remaining time of work that has been going on is shorter or longer than that of new work."""

import numpy as np

from paceline.argument_types import checked_types
from paceline.theory.round_trip import RoundTrip
from paceline.timing import (
    Deterministic,
    Empirical,
    Exponential,
    Gamma,
    HyperExponential,
    Law,
    ShiftedExponential,
    Uniform,
)


@checked_types
def new_longer_than_used(law: Law) -> bool:
    """Return whether it is known that new work never takes less than work that is under way still does.

    ``P(X > u + t | X > t) <= P(X > u)`` for all t, u >= 0

    True of `Deterministic`, `Uniform`, `Exponential`, `ShiftedExponential`, of `Gamma` with shape >= 1, and of an
    `Empirical` law that is so in each of its values. Not of `Pareto`, `LogNormal` and `HyperExponential`, whose long
    times become longer the longer they have lasted. A law of the user's own is not known.

    >>> new_longer_than_used(Gamma(shape=2.0, mean_s=1.0)), new_longer_than_used(Gamma(shape=0.5, mean_s=1.0))
    (True, False)

    Source: Dutta et al., AISTATS 2018, Definition 3 (in reliability: "new better than used").
    """
    match law:
        case Deterministic() | Uniform() | Exponential() | ShiftedExponential():
            return True
        case Gamma(shape):
            return shape >= 1
        case HyperExponential(means_s):
            return len(set(means_s)) == 1
        case Empirical():
            return _every_value_ages(law)
        case RoundTrip(compute):  # work of a constant length before it, and a stretch, keep the property
            return new_longer_than_used(compute)
    return False


@checked_types
def new_shorter_than_used(law: Law) -> bool:
    """Return whether it is known that new work never takes longer than work that is under way still does.

    ``P(X > u + t | X > t) >= P(X > u)`` for all t, u >= 0

    True of `Exponential`, `HyperExponential`, and of `Gamma` with shape <= 1. A constant part in the time destroys
    it: `Pareto`, whose smallest value is above 0, has neither property.

    Source: Dutta et al., AISTATS 2018, Sect. 4.3 (in reliability: "new worse than used").
    """
    match law:
        case Exponential() | HyperExponential():
            return True
        case ShiftedExponential(shift_s):
            return shift_s == 0
        case Gamma(shape):
            return shape <= 1
        case RoundTrip(compute, _, network_s):
            return network_s == 0 and new_shorter_than_used(compute)
    return False


@checked_types
def memoryless(law: Law) -> bool:
    """Return whether new work and work under way take equally long: of all laws only the exponential."""
    return new_longer_than_used(law) and new_shorter_than_used(law)


def _every_value_ages(law: Empirical) -> bool:
    """Compare ``P(X > u + t)`` with ``P(X > u) P(X > t)`` where the left side jumps down last: at pairs of values."""
    values_s = np.array(law.values_s)
    m = len(values_s)
    at_s = np.unique(values_s)
    beyond = m - np.searchsorted(values_s, at_s, side="right")
    for t_s, beyond_t in zip(at_s, beyond, strict=True):
        beyond_both = m - np.searchsorted(values_s, at_s + t_s, side="right")
        if np.any(beyond_both * m > beyond * beyond_t):
            return False
    return True
