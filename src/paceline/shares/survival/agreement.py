"""Agreement of the living after a loss: what counts, who lacks it, and which batches are computed again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline.errors import RunError

Range = tuple[int, int]  # numbers of batches from the first on, and before the second


class OutOfStepError(RunError):
    """Ranks that cannot go on together: their scripts have called unlike collectives."""


class PlaceReport(NamedTuple):
    """Place of a rank in the script.

    A script is a sequence of units, the same on all ranks: the sums of one backward pass, or one other collective. A
    rank begins a unit only if it has the one before, so of two ranks one has at most one unit more.

    Attributes:
        position: units that this rank has passed.
        voids: units that were given up.
        stepped: last unit whose sums were used in a step; -1 for none.
        undone: number of the first batch that was used in no step.
        handed_out: number of batches handed out.
        dealt: number of batches dealt, some of which loaders hold.
        dropped: ranges of batches that were dealt and are not handed out.
        is_sum: whether the rank stands in sums, not in another collective or between two units.
        updates: number of steps that were not in vain.
        rates: learning rates of its optimizers.
        checksum: checksum of the samples that it has computed last.
        is_new: whether it comes back, and has no state.
    """

    position: int
    voids: tuple[int, ...] = ()
    stepped: int = -1
    undone: int = 0
    handed_out: int = 0
    dealt: int = 0
    dropped: tuple[Range, ...] = ()
    is_sum: bool = False
    updates: int = 0
    rates: tuple[float, ...] = ()
    checksum: int = 0
    is_new: bool = False


class Agreement(NamedTuple):
    """What all living ranks do after a loss.

    Attributes:
        source: rank from which others get what they lack.
        given: ranks that get the state after the step that they lack.
        late: ranks that come back to a place that the others have passed.
        apart: ranks that come back to a place that is not that of the others, with other counts or other samples.
        told: ranks that get the result of the collective that they lack.
        voids: units that are given up.
        in_vain: range of the batches that are computed without a step, and again later.
        dropped: ranges of batches that are not handed out, since they were dealt to other ranks.
    """

    source: int
    given: tuple[int, ...]
    late: tuple[int, ...]
    apart: tuple[int, ...]
    told: tuple[int, ...]
    voids: tuple[int, ...]
    in_vain: Range
    dropped: tuple[Range, ...]


def agree(reports: Mapping[int, PlaceReport]) -> Agreement:
    """Return what the living ranks agree on.

    The unit at which the foremost ranks stand is given up on all if it is a sum: their buffers hold no gradient any
    more. A rank that lacks the unit before gets the state, if the foremost have made a step with it; if they have not,
    the step is left out on all, since the batches that are in no step are computed again.

    Raises:
        OutOfStepError: ranks are further apart than a unit.
    """
    known = {rank: each for rank, each in reports.items() if not each.is_new}
    last = max(each.position for each in known.values())
    voids = {unit for each in known.values() for unit in each.voids}
    lacking = {rank: set(range(each.position, last)) - voids for rank, each in known.items()}
    if any(len(units) > 1 for units in lacking.values()):
        places = ", ".join(f"rank {rank} at {each.position}" for rank, each in sorted(known.items()))
        raise OutOfStepError(f"the ranks are further apart than one sum: {places}")
    source = min(rank for rank, each in known.items() if each.position == last)
    behind = [rank for rank, units in sorted(lacking.items()) if units]
    given = [rank for rank in behind if known[rank].is_sum and reports[source].stepped >= known[rank].position]
    if any(each.is_sum for each in known.values() if each.position == last):
        voids.add(last)
    new = {rank: each for rank, each in sorted(reports.items()) if each.is_new}
    late = tuple(rank for rank, each in new.items() if each.position < last)
    apart = tuple(rank for rank, each in new.items() if rank not in late and _place(each) != _place(known[source]))
    here = {rank: each for rank, each in reports.items() if rank not in {*late, *apart}}
    handed_out = max(each.handed_out for each in here.values())
    dealt = max(each.dealt for each in here.values())
    dropped = {each for report in known.values() for each in report.dropped}
    return Agreement(
        source=source,
        given=(*given, *(rank for rank in new if rank in here)),
        late=late,
        apart=apart,
        told=tuple(rank for rank in behind if not known[rank].is_sum),
        voids=tuple(sorted(voids)),
        in_vain=(known[source].undone, handed_out),
        dropped=tuple(sorted({*dropped, (handed_out, dealt)} if dealt > handed_out else dropped)),
    )


def _place(report: PlaceReport) -> tuple[object, ...]:
    return report.position, report.updates, report.rates, report.checksum
