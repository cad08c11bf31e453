"""Quorums that do not adapt to losses or times: fixed, scheduled, or a function of the user."""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from paceline.errors import UsageError
from paceline.policies.controllers.base import Action, Controller, Observation, SetQuorum
from paceline.utils.checked_dataclass import checked_dataclass


class _QuorumRule(Controller[None]):
    """Base class of stateless quorum rules: a subclass returns the quorum of the update that opens."""

    def begin(self, n: int) -> None:
        """Return no state."""

    def decide(self, state: None, observation: Observation) -> tuple[None, Sequence[Action]]:
        """Set the quorum when an update opens."""
        return None, [self._quorum(observation)] if observation.trigger == "open" else []

    @abstractmethod
    def _quorum(self, observation: Observation) -> SetQuorum: ...


@checked_dataclass(frozen=True)
class FixedQuorum(_QuorumRule):
    """Constant quorum of k gradients.

    Args:
        k: number of gradients in every update, >= 1.
    """

    k: int

    def __post_init__(self) -> None:
        _check(self.k)

    def _quorum(self, observation: Observation) -> SetQuorum:
        return SetQuorum(self.k, f"fixed k={self.k}")


@checked_dataclass(frozen=True)
class ScheduledQuorum(_QuorumRule):
    """Piecewise-constant quorum: the k of the last schedule entry at or before the version.

    Args:
        schedule: quorum by first version, both whole; versions >= 0, one of them 0, and quorums >= 1.

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
        """Return the scheduled quorum of a version, >= 0."""
        versions = sorted(self.schedule)
        return self.schedule[versions[bisect_right(versions, version) - 1]]

    def _quorum(self, observation: Observation) -> SetQuorum:
        k = self.k_at(observation.version)
        return SetQuorum(k, f"scheduled k={k} from version {observation.version}")


@checked_dataclass(frozen=True, repr=False)
class QuorumFunction(_QuorumRule):
    """Quorum computed by a function of the user when an update opens.

    Args:
        choose: function from an `Observation` to k, a whole number >= 1.
    """

    choose: Callable[[Observation], int]

    def _quorum(self, observation: Observation) -> SetQuorum:
        k = _check(self.choose(observation))
        return SetQuorum(k, f"{getattr(self.choose, '__name__', 'function')} chose k={k}")


def _check(k: int) -> int:
    if not isinstance(k, int) or k < 1:
        raise UsageError(f"quorum k = {k!r}, expected a whole number >= 1")
    return k
