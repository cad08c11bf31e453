"""Analysis of a DDP recording: how much rank-time was waiting, and for which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.ddp_recording.layout import PARTS
from paceline.ddp_recording.recording import DDPRecording, Seconds

SLOW = 0.2  # excess over the median of the other ranks from which a rank is slow in a step, as a share of that median
LEAST_STEPS_SHARE = 0.01  # of the steps in which a straggler is slow
PERSISTENT = 0.8  # share of slow steps from which a straggler is persistent


class TimeShares(NamedTuple):
    """Use of the rank-time of a recording, in rank-seconds.

    Attributes:
        working_s: own work of the ranks: data, forward and backward pass.
        summing_s: sums of gradients and other collectives while no rank was late.
        waiting_s: waiting of ranks for slower ones.
    """

    working_s: float
    summing_s: float
    waiting_s: float

    @property
    def total_s(self) -> float:
        """All rank-seconds."""
        return self.working_s + self.summing_s + self.waiting_s

    @property
    def waiting_share(self) -> float:
        """Share of the rank-time that was waiting, 0 to 1."""
        return self.waiting_s / self.total_s


class StragglerFacts(NamedTuple):
    """Slow rank of a recording.

    Attributes:
        rank: number of the rank.
        host: name of its host.
        steps_share: share of the steps in which it was the slowest rank and slow, 0 to 1.
        excess_s: mean seconds above the median of the other ranks in these steps.
        part: part of the step with the largest excess: "data", "forward" or "backward"; "unknown" for a script without
            a DDP model.
        part_excess_s: mean excess of this part, in seconds.
        episodes: number of uninterrupted sequences of such steps.
        cost_s: mean seconds by which a step would be shorter without this rank, over all steps.
    """

    rank: int
    host: str
    steps_share: float
    excess_s: float
    part: str
    part_excess_s: float
    episodes: int
    cost_s: float

    @property
    def is_persistent(self) -> bool:
        """Whether the rank is slow in most of the steps."""
        return self.steps_share >= PERSISTENT


def time_shares(recording: DDPRecording) -> TimeShares:
    """Return how the rank-time was used.

    The wait for a sum is at least as long as the sum, and the last rank waits for nothing else. So the shortest wait of
    any rank is the time of the sum, and the rest of each wait is waiting. Only durations are compared, so the clocks of
    hosts need not agree.
    """
    together_s = [recording.part_s(part) for part in ("collectives", "sync")]
    summing_s = sum(float(part_s.min(axis=0).sum()) * recording.ranks for part_s in together_s)
    working_s = float(recording.work_s.sum())
    return TimeShares(working_s, summing_s, float(recording.step_s.sum()) - working_s - summing_s)


def excess_s(seconds: Seconds) -> Seconds:
    """Return the excess of each rank over the median of the other ranks, in each step: ranks x steps."""
    others = [np.median(np.delete(seconds, rank, axis=0), axis=0) for rank in range(len(seconds))]
    excess: Seconds = seconds - np.stack(others)
    return excess


def slow_ranks(work_s: Seconds) -> NDArray[np.int64]:
    """Return the slow rank of each step, the slowest if its excess is large enough, else -1."""
    slowest = work_s.argmax(axis=0)
    steps = np.arange(work_s.shape[1])
    excess = excess_s(work_s)[slowest, steps]
    is_slow = excess > SLOW * (work_s[slowest, steps] - excess)
    named: NDArray[np.int64] = np.where(is_slow, slowest, -1)
    return named


def find_stragglers(recording: DDPRecording) -> list[StragglerFacts]:
    """Return the ranks that were slow, the one with the largest cost first."""
    named = slow_ranks(recording.work_s)
    ranks = [rank for rank in range(recording.ranks) if np.mean(named == rank) >= LEAST_STEPS_SHARE]
    found = [_facts(recording, rank, named == rank) for rank in ranks]
    return sorted(found, key=lambda each: -each.cost_s)


def _facts(recording: DDPRecording, rank: int, is_slow: NDArray[np.bool_]) -> StragglerFacts:
    parts_s = {part: float(excess_s(recording.part_s(part))[rank, is_slow].mean()) for part in PARTS}
    part = max(parts_s, key=lambda name: parts_s[name])
    without_s = np.delete(recording.work_s, rank, axis=0).max(axis=0)
    return StragglerFacts(
        rank=rank,
        host=recording.headers[rank].host,
        steps_share=float(is_slow.mean()),
        excess_s=float(excess_s(recording.work_s)[rank, is_slow].mean()),
        part="unknown" if recording.is_coarse else part,
        part_excess_s=parts_s[part],
        episodes=_episodes(is_slow),
        cost_s=float(np.maximum(recording.work_s[rank] - without_s, 0).mean()),
    )


def _episodes(flags: Sequence[bool] | NDArray[np.bool_]) -> int:
    padded = np.concatenate([[False], flags])
    return int((padded[1:] & ~padded[:-1]).sum())
