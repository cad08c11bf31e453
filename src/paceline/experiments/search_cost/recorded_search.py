"""Search for the switch point over recorded runs."""

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


@dataclass(frozen=True, kw_only=True)
class Rung:
    """Switch point on the ladder of a search.

    Attributes:
        fraction: share of the workload under BSP, in (0, 1].
        accuracies: final accuracies of its recorded runs, shares.
        time_s: mean duration of these runs in seconds, > 0.
        stands_alone: whether a single run stands for any number of runs.
    """

    fraction: float
    accuracies: tuple[float, ...]
    time_s: float
    stands_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class RecordedSearch:
    """Search for the switch point: the ladder of switch points and the rule of acceptance.

    The search tries one rung after another and ends at the first that fails. Its result is the rung before, or BSP
    alone if the first rung fails.

    Args:
        bsp: recorded runs of BSP alone.
        ladder: rungs in the order of the search, with falling shares of BSP.
        margin: largest shortfall of the mean accuracy of a rung from the target, in [0, 1].
        two_sided: whether the mean accuracy must also not exceed the target by more than the margin.
        target: known target accuracy of a recurring job, in [0, 1]; the mean of all recorded BSP runs if None.
        truth: right fraction; the result of the search with all recorded runs if None.

    Raises:
        UsageError: the shares of the ladder do not fall, the truth is not on it, or a BSP run diverged.

    Source: Li et al. (Sync-Switch), ICDCS 2021, Sect. VI-C1. Differs from Algorithm 1, which after a failure tries the
    middle between that point and the last accepted one, for which there are rarely recorded runs.
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
            raise UsageError("a recorded BSP run diverged (accuracy nan), so there is no target; leave it out")
        fractions = [1.0, *(rung.fraction for rung in self.ladder)]
        if len(fractions) < 2 or any(after >= before for before, after in pairwise(fractions)):
            tried = ", ".join(map(percent, fractions[1:])) or "nothing"
            raise UsageError(f"the ladder is {tried}; expected falling shares below 100%, as 50%,25%,12.5%")
        if self.truth is not None and self.truth not in fractions:
            known = ", ".join(map(percent, fractions))
            raise UsageError(f"truth={percent(self.truth)} is not on the ladder; give one of {known}")

    @property
    def known_target(self) -> float:
        """Target accuracy of a recurring job."""
        return fmean(self.bsp.accuracies) if self.target is None else self.target

    @property
    def right(self) -> int:
        """Right number of accepted rungs."""
        if self.truth is not None:
            return [1.0, *(rung.fraction for rung in self.ladder)].index(self.truth)
        target = self.known_target
        fails = (i for i, rung in enumerate(self.ladder) if not self.accepts(fmean(rung.accuracies), target))
        return next(fails, len(self.ladder))

    @property
    def found(self) -> Rung:
        """Right rung."""
        return self.ladder[self.right - 1] if self.right else self.bsp

    def accepts(self, mean_accuracy: float, target: float) -> bool:
        """Return whether a mean accuracy is accepted for a target."""
        return accepts([mean_accuracy], target, self.margin, self.two_sided)

    def cost(self, bsp_runs: int, candidate_runs: int, accepted: int) -> float:
        """Return the cost of a search that accepts a number of rungs, in runs of BSP, including the rung that fails."""
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
    """Return the search over recorded runs.

    Args:
        runs: runs by share of the workload under BSP, as from `read_recorded_runs`.
        ladder: shares in the order of the search, falling; if None, all recorded shares between 0 and 1.
        stand_ins: recorded share whose runs stand for a share of the ladder; a share that is not named has its own.
        best_alone: shares of the ladder of which only the most accurate run counts, for any number of draws.
        margin: largest shortfall of the mean accuracy of a share from the target, in [0, 1].
        two_sided: whether the mean accuracy must also not exceed the target by more than the margin.
        target: known target accuracy of a recurring job, in [0, 1]; the mean of all recorded BSP runs if None.
        truth: right share; the result of the search with all recorded runs if None.

    Raises:
        UsageError: a share has no recorded runs, or a named share is not on the ladder.
    """
    others = {same_fraction(share): same_fraction(other) for share, other in (stand_ins or {}).items()}
    alone = {same_fraction(share) for share in best_alone}
    shares = [same_fraction(share) for share in ladder] if ladder is not None else _recorded_between(runs)
    for share in (*others, *alone):
        if share not in (1.0, *shares):
            tried = ", ".join(map(percent, shares))
            raise UsageError(f"{percent(share)} is not on the ladder; give one of {tried}, or add it to the ladder")
    rungs = [_rung(runs, share, others.get(share, share), share in alone) for share in (1.0, *shares)]
    known = None if truth is None else same_fraction(truth)
    return RecordedSearch(
        bsp=rungs[0], ladder=tuple(rungs[1:]), margin=margin, two_sided=two_sided, target=target, truth=known
    )


def _recorded_between(runs: Runs) -> list[float]:
    return sorted((share for share in runs if 0 < share < 1), reverse=True)


def _rung(runs: Runs, share: float, recorded: float, is_alone: bool) -> Rung:
    if recorded not in runs:
        known = ", ".join(percent(each) for each in sorted(runs, reverse=True))
        of = f"{percent(recorded)}, the stand-in for {percent(share)}" if recorded != share else percent(share)
        raise UsageError(f"no runs were recorded at {of}; give another stand-in, one of {known}")
    chosen = [max(runs[recorded], key=_accuracy)] if is_alone else runs[recorded]
    return Rung(
        fraction=share,
        accuracies=tuple(run.accuracy for run in chosen),
        time_s=fmean(run.time_s for run in chosen),
        stands_alone=is_alone,
    )


def _accuracy(run: RecordedRun) -> float:
    return -inf if isnan(run.accuracy) else run.accuracy
