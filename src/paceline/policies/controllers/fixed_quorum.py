"""Quorums that are known beforehand: fixed, scheduled, or a user's function."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.policies.controllers.base import Action, Controller, Observation, SetQuorum
from paceline.utils.argument_types import checked_types


@checked_types
@dataclass(frozen=True)
class FixedQuorum(Controller[None]):
    """Wait for k gradients in every update.

    Args:
        k: gradients, at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        _check(self.k)

    def begin(self, n: int) -> None:
        """Nothing to remember."""

    def decide(self, state: None, moment: Observation) -> tuple[None, Sequence[Action]]:
        """Set k when an update opens."""
        return None, [SetQuorum(self.k, f"fixed k={self.k}")] if moment.asked == "open" else []


@checked_types
@dataclass(frozen=True)
class ScheduledQuorum(Controller[None]):
    """Wait for the k of the last entry at or before the version.

    Args:
        schedule: version -> k, with an entry for version 0.

    Example:
        >>> ScheduledQuorum({0: 4, 100: 8}).k_at(99)
        4
    """

    schedule: Mapping[int, int]

    def __post_init__(self) -> None:
        if 0 not in self.schedule or min(self.schedule) < 0:
            raise UsageError(f"schedule {dict(self.schedule)}, expected versions >= 0, one of them 0")
        for k in self.schedule.values():
            _check(k)

    def k_at(self, version: int) -> int:
        """Return the quorum that the schedule has for this version."""
        versions = sorted(self.schedule)
        return self.schedule[versions[bisect_right(versions, version) - 1]]

    def begin(self, n: int) -> None:
        """Nothing to remember."""

    def decide(self, state: None, moment: Observation) -> tuple[None, Sequence[Action]]:
        """Set the scheduled k when an update opens."""
        if moment.asked != "open":
            return None, []
        k = self.k_at(moment.version)
        return None, [SetQuorum(k, f"scheduled k={k} from version {moment.version}")]


@checked_types
@dataclass(frozen=True, repr=False)
class QuorumFunction(Controller[None]):
    """Wait for as many gradients as a function says when an update opens.

    Args:
        choose: the function, from the moment to k >= 1.
    """

    choose: Callable[[Observation], int]

    def begin(self, n: int) -> None:
        """Nothing to remember."""

    def decide(self, state: None, moment: Observation) -> tuple[None, Sequence[Action]]:
        """Ask the function when an update opens."""
        if moment.asked != "open":
            return None, []
        k = _check(self.choose(moment))
        return None, [SetQuorum(k, f"{getattr(self.choose, '__name__', 'function')} chose k={k}")]


def _check(k: int) -> int:
    if not isinstance(k, int) or k < 1:
        raise UsageError(f"quorum k = {k!r}, expected a whole number >= 1")
    return k
