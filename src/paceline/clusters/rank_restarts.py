"""Restarts of lost ranks, for the launchers of paceline: how often each rank returns, and which ranks with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

LONGEST_PAUSE_S = 60.0
WORK_S = 60.0  # of a rank, after which its earlier losses no longer count for the next pause
MOST_FAILURES = 3  # in a row, each within WORK_S of its start: the script fails, not the machine


@dataclass(frozen=True)
class MakeRank:
    """Make the process of a rank, in place of the one before."""

    rank: int


@dataclass(frozen=True)
class EndRank:
    """End the process of a rank, if there is one, also if it has not been made yet."""

    rank: int


class Return(Enum):
    """What follows the loss of a rank."""

    ALONE = "the rank is made again, and the others go on"
    ALL = "all ranks are made again"
    WITHOUT = "the others go on without the rank"
    NEVER = "the run cannot go on"


def pause_s(losses: int, first_pause_s: float) -> float:
    """Return the seconds before a rank is made again: twice as many with each loss, at most `LONGEST_PAUSE_S`.

    Args:
        losses: number of losses in a row, each before the rank had worked for `WORK_S`, >= 1.
        first_pause_s: seconds after the first one, >= 0.

    >>> [pause_s(losses, 1.0) for losses in (1, 2, 3, 9)]
    [1.0, 2.0, 4.0, 60.0]
    """
    return min(LONGEST_PAUSE_S, first_pause_s * 2.0 ** (losses - 1))


class RankRestarts:
    """Count of the restarts of each rank, and the rule for a loss.

    Args:
        max_restarts: number of times that each rank is made again, >= 0; -1 for no limit.
    """

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self._counts: Counter[int] = Counter()

    def may_return(self, rank: int) -> bool:
        """Return whether a rank may be made again."""
        return self.max_restarts < 0 or self._counts[rank] < self.max_restarts

    def after_loss(self, rank: int, *, others_go_on: bool, has_begun: bool = True) -> Return:
        """Count the loss of a rank, and return what follows.

        Args:
            rank: rank that is lost.
            others_go_on: whether the other ranks can go on without it.
            has_begun: whether the run has begun; before, a rank is made again alone.
        """
        if not self.may_return(rank):
            return Return.WITHOUT if others_go_on else Return.NEVER
        self._counts[rank] += 1
        return Return.ALONE if others_go_on or not has_begun else Return.ALL
