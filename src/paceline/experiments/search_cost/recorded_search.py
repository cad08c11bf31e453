"""A search for the switch point, carried out over recorded runs instead of new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isnan
from statistics import fmean

from paceline.errors import UsageError
from paceline.experiments.search_cost.recorded_runs import RecordedRun, Runs, percent, same_fraction
from paceline.experiments.switch_point.bisection import accepts
from paceline.utils.validation import check_range


@dataclass(frozen=True)
class Rung:
    """A switch point that the search tries.

    Attributes:
        fraction: of the workload that is trained with BSP first.
        accuracies: of the recorded runs that stand for it.
        time_s: mean of theirs.
        stands_alone: whether a single run stands for as many as are asked for.
    """

    fraction: float
    accuracies: tuple[float, ...]
    time_s: float
    stands_alone: bool = False


@dataclass(frozen=True)
class RecordedSearch:
    """Which switch points are tried, in which order, and when one is good enough.

    The search tries one rung after the other and ends at the first that fails; what it finds is the rung before, or
    BSP alone where the very first one fails.

    Args:
        bsp: what was recorded of BSP alone.
        ladder: rungs in the order in which they are tried, less BSP in each.
        margin: by which the mean accuracy of a rung may fall short of the target.
        two_sided: whether it may not be better by more than that either.
        target: accuracy that a recurring job knows already; the mean of all recorded BSP runs if None.
        truth: the fraction that the search ought to find; what it finds when it has all recorded runs, if None.

    Raises:
        UsageError: the ladder does not go down, the truth is not on it, or a BSP run has diverged.

    Source: Li et al. (Sync-Switch), ICDCS 2021, Sect. VI-C1. Differs from Algorithm 1, which after a failure tries the
    middle between that point and the last good one: recorded runs rarely have it.
    """

    bsp: Rung
    ladder: tuple[Rung, ...]
    margin: float = 0.01
    two_sided: bool = False
    target: float | None = None
    truth: float | None = None

    def __post_init__(self) -> None:
        check_range("[0, 1]", margin=self.margin)
        if self.target is not None:
            check_range("[0, 1]", target=self.target)
        if any(map(isnan, self.bsp.accuracies)):
            raise UsageError("a recorded BSP run has diverged (accuracy nan), so there is no target; leave it out")
        fractions = [1.0, *(rung.fraction for rung in self.ladder)]
        if len(fractions) < 2 or any(after >= before for before, after in pairwise(fractions)):
            tried = ", ".join(map(percent, fractions[1:])) or "nothing"
            raise UsageError(f"the ladder is {tried}; expected falling shares below 100%, as 50%,25%,12.5%")
        if self.truth is not None and self.truth not in fractions:
            known = ", ".join(map(percent, fractions))
            raise UsageError(f"the truth is {percent(self.truth)}, which the search never finds; give one of {known}")

    @property
    def known_target(self) -> float:
        """The accuracy that a recurring job is held to."""
        return fmean(self.bsp.accuracies) if self.target is None else self.target

    @property
    def right(self) -> int:
        """How many rungs the search ought to accept."""
        if self.truth is not None:
            return [1.0, *(rung.fraction for rung in self.ladder)].index(self.truth)
        target = self.known_target
        fails = (i for i, rung in enumerate(self.ladder) if not self.accepts(fmean(rung.accuracies), target))
        return next(fails, len(self.ladder))

    @property
    def found(self) -> Rung:
        """The rung that it ought to find."""
        return self.ladder[self.right - 1] if self.right else self.bsp

    def accepts(self, mean_accuracy: float, target: float) -> bool:
        """Return whether runs of this mean accuracy are good enough."""
        return accepts([mean_accuracy], target, self.margin, self.two_sided)

    def cost(self, bsp_runs: int, candidate_runs: int, accepted: int) -> float:
        """Return what a search costs that accepts so many rungs, in runs of BSP; the one that fails is paid too."""
        tried = self.ladder[: accepted + 1]
        return bsp_runs + candidate_runs * sum(rung.time_s for rung in tried) / self.bsp.time_s


def recorded_search(
    runs: Runs,
    ladder: Sequence[float] | None = None,
    stand_ins: dict[float, float] | None = None,
    best_alone: Sequence[float] = (),
    margin: float = 0.01,
    two_sided: bool = False,
    target: float | None = None,
    truth: float | None = None,
) -> RecordedSearch:
    """Return the search over runs that were recorded.

    Args:
        runs: by the share of the workload that was BSP, as `read_recorded_runs` gives them.
        ladder: shares in the order in which they are tried; all that were recorded below 1 and above 0 if None.
        stand_ins: which recorded share's runs stand for a share of the ladder, itself where it is not named.
        best_alone: shares of the ladder for which only the most accurate of their runs stands, however many are drawn.
        margin: by which the mean accuracy of a share may fall short of the target.
        two_sided: whether it may not be better by more than that either.
        target: accuracy that a recurring job knows already; the mean of all recorded BSP runs if None.
        truth: the share that the search ought to find; what it finds when it has all recorded runs, if None.

    Raises:
        UsageError: a share has no recorded runs, or something is named that is not on the ladder.
    """
    others = {same_fraction(share): same_fraction(other) for share, other in (stand_ins or {}).items()}
    alone = {same_fraction(share) for share in best_alone}
    shares = [same_fraction(share) for share in ladder] if ladder is not None else _recorded_between(runs)
    for share in (*others, *alone):
        if share not in (1.0, *shares):
            tried = ", ".join(map(percent, shares))
            raise UsageError(f"{percent(share)} is not on the ladder; name one of {tried}, or put it on the ladder")
    rungs = [_rung(runs, share, others.get(share, share), share in alone) for share in (1.0, *shares)]
    known = None if truth is None else same_fraction(truth)
    return RecordedSearch(rungs[0], tuple(rungs[1:]), margin, two_sided, target, known)


def _recorded_between(runs: Runs) -> list[float]:
    return sorted((share for share in runs if 0 < share < 1), reverse=True)


def _rung(runs: Runs, share: float, recorded: float, is_alone: bool) -> Rung:
    if recorded not in runs:
        known = ", ".join(percent(each) for each in sorted(runs, reverse=True))
        of = f"{percent(recorded)}, which is to stand for {percent(share)}" if recorded != share else percent(share)
        raise UsageError(f"no runs were recorded at {of}; name another share that stands for it, of {known}")
    chosen = [max(runs[recorded], key=_accuracy)] if is_alone else runs[recorded]
    return Rung(share, tuple(run.accuracy for run in chosen), fmean(run.time_s for run in chosen), is_alone)


def _accuracy(run: RecordedRun) -> float:
    return -inf if isnan(run.accuracy) else run.accuracy
