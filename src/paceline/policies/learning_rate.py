"""How the learning rate follows the number of gradients in an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.core.duration import Duration
from paceline.errors import UsageError
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import short_repr
from paceline.utils.state_dict import restore, snapshot
from paceline.utils.validation import check_range


@dataclass(frozen=True)
class LRScaling:
    """Factor on the optimizer's own rate for an update of k gradients, with n live workers.

    eta(k) = eta_max ("constant") or eta_max * k / n ("proportional"), where eta_max is the optimizer's own
    rate ("total") or n times it ("per_worker").

    Args:
        rule: "constant" or "proportional".
        lr_is: "total" or "per_worker".

    Example:
        >>> LRScaling("proportional").scale(k=4, n=16)
        0.25
        >>> LRScaling("proportional", "per_worker").scale(k=4, n=16)
        4.0

    Source: Chen et al. 2016; Xu et al. (DBW) 2020, Sect. 4; Li et al. (Sync-Switch) 2021, Sect. IV-C.
    """

    rule: str = "constant"
    lr_is: str = "total"

    def __post_init__(self) -> None:
        if self.rule not in {"constant", "proportional"}:
            raise UsageError(f"lr_rule = {self.rule!r}, expected 'constant' or 'proportional'")
        if self.lr_is not in {"total", "per_worker"}:
            raise UsageError(f"lr_is = {self.lr_is!r}, expected 'total' or 'per_worker'")

    def scale(self, k: int, n: int) -> float:
        """Return eta(k) divided by the optimizer's own rate; k and n are at least 1."""
        share = k / n if self.rule == "proportional" else 1.0
        return share * n if self.lr_is == "per_worker" else share


PLATEAU = "plateau"


class Scales(NamedTuple):
    """What one update multiplies the optimizer's own learning rate and weight decay by."""

    lr: float = 1.0
    weight_decay: float = 1.0


@checked_types
@dataclass(frozen=True)
class LinearSchedule:
    """Linear warm-up, which a plateau of the training loss may end, and linear decay, both by workload.

    After w accepted gradients, scale(w) = w / warm_up while w < end, and then, with the scale that was reached,
    scale(w) = end / warm_up * (total - w) / (total - end). The learning rate is multiplied by it, beside what
    `LRScaling` says of the k gradients of an update, and the weight decay by ``weight_decay`` times it. An update
    that takes the workload from w to w + k has scale(w + k/2), the mean over its gradients, so that a schedule means
    the same under every protocol.

    A plateau is looked for every ``check_every``: if the mean training loss of the last epoch is not less than that at
    the check before (`is_plateau`), the warm-up ends there. So the earliest it may end is at the second check.

    Args:
        warm_up: workload in which the scale would rise to 1, as "50%", "epochs=5", "gradients=500" or an `Duration`.
        warm_up_until: where it ends: at a "plateau", at a workload, or at its full length (None); a plateau that is
            not found ends it there too.
        check_every: workload between two looks at the loss.
        least_reduction: share of the loss, in [0, 1), by which it has to have fallen at a check.
        weight_decay: k, >= 0; None leaves the weight decay as it is.
        total: where the scale reaches 0; the whole workload of the run if not given.

    Raises:
        UsageError: an extent is not one of workload, or a number is out of its range.

    Example:
        >>> curve = LinearSchedule(warm_up="epochs=45", warm_up_until="epochs=15").in_gradients(9000, per_epoch=100)
        >>> [round(curve.scale(100 * epoch, end=curve.until), 3) for epoch in (0, 5, 15, 90)]
        [0.0, 0.111, 0.333, 0.0]

    Source: Rigazzi, "DC-S3GD", 2019, Sect. IV-A: a warm-up of half the iterations, ended by hand after 15 or 20 of 90
    epochs; a check of every five epochs is the outlook; the same schedule on weight decay, times k = 2.3. Their rate
    eta = N eta_single is lr_rule="proportional" with lr_is="per_worker".
    Differs from the paper: it watches the training error; what arrives here is the loss. "Error reduction" is read as
    any reduction since the check before, of the mean over one epoch. Where in an iteration its rate is taken it does
    not say; in the middle it is never 0.
    """

    warm_up: str | Duration = "50%"
    warm_up_until: str | Duration | None = PLATEAU
    check_every: str | Duration = "epochs=5"
    least_reduction: float = 0.0
    weight_decay: float | None = 2.3
    total: str | Duration | None = None

    def __post_init__(self) -> None:
        self._extent("warm_up")
        self._extent("check_every")
        if self.warm_up_until not in (None, PLATEAU):
            self._extent("warm_up_until")
        if self.total is not None:
            self._extent("total")
        check_range("[0, 1)", least_reduction=self.least_reduction)
        if self.weight_decay is not None:
            check_range("[0, inf)", weight_decay=self.weight_decay)

    def __repr__(self) -> str:
        return short_repr(self)

    def in_gradients(self, total: float | None, per_epoch: float | None) -> Curve:
        """Return the schedule in numbers.

        Args:
            total: gradients of the whole run, None if its stop does not fix them.
            per_epoch: gradients of one epoch, None if the data have no length.

        Raises:
            UsageError: it cannot be known when it ends, or its parts do not fit in one another.
        """
        end = self._gradients("total", total, per_epoch) if self.total is not None else total
        if end is None:
            raise UsageError(
                f"{self}: the stop does not fix the workload, at which the learning rate comes to 0; add epochs= or "
                "gradients= to the stop, or give the schedule total='epochs=90'"
            )
        self._check_order("total", end, "the run", total or 0.0)
        warm_up = self._gradients("warm_up", end, per_epoch)
        self._check_order("total", end, "warm_up", warm_up)
        if self.warm_up_until in (None, PLATEAU):
            until = warm_up
        else:
            until = self._gradients("warm_up_until", end, per_epoch)
            self._check_order("warm_up", warm_up, "warm_up_until", until)
        every = 0
        if self.warm_up_until == PLATEAU:
            every = max(1, round(self._gradients("check_every", end, per_epoch)))
        window = max(1, min(every, round(per_epoch or every)))
        return Curve(warm_up, until, end, self.weight_decay, every, window, self.least_reduction)

    def _gradients(self, name: str, total: float | None, per_epoch: float | None) -> float:
        return self._extent(name).in_gradients(total, per_epoch).amount

    def _extent(self, name: str) -> Duration:
        given = getattr(self, name)
        extent = Duration.parse(given) if isinstance(given, str) else given
        if not isinstance(extent, Duration) or extent.unit in {"updates", "seconds"}:
            raise UsageError(
                f"schedule: {name} = {given!r}, expected workload, as '50%', 'epochs=5' or 'gradients=500'"
            )
        return extent

    def _check_order(self, name: str, end: float, inner: str, inner_end: float) -> None:
        if inner_end > end:
            raise UsageError(
                f"{self}: {name} is {end:.12g} gradients, and {inner} ends at {inner_end:.12g}; expected no more"
            )


@dataclass(frozen=True)
class Curve:
    """A `LinearSchedule` in gradients.

    Attributes:
        warm_up: that would bring the scale to 1.
        until: where the warm-up ends, if no plateau ends it before.
        total: where the scale comes to 0.
        weight_decay: factor, None to leave the weight decay as it is.
        check_every: between two looks at the loss, 0 for none.
        window: whose mean loss is looked at.
        least_reduction: of that loss, as a share.
    """

    warm_up: float
    until: float
    total: float
    weight_decay: float | None
    check_every: int
    window: int
    least_reduction: float

    def scale(self, workload: float, end: float) -> float:
        """Return the scale at a workload, in [0, 1], where the warm-up has ended or will end at `end`."""
        if workload < end:
            return workload / self.warm_up
        left = max(0.0, self.total - workload) / (self.total - end) if end < self.total else 0.0
        return end / self.warm_up * left


class ScheduleTracker:
    """Follows a schedule through a run, and notices where its warm-up ends.

    Args:
        curve: the schedule.
    """

    def __init__(self, curve: Curve) -> None:
        self._curve = curve
        self._accepted = 0
        self._ended_at: float | None = None
        self._sum = 0.0  # of the losses in the window before the next check
        self._before: float | None = None  # the mean at the latest check

    def scales(self, workload: int, k: int) -> Scales:
        """Return the scales of an update of k gradients after this workload."""
        curve = self._curve
        scale = curve.scale(workload + k / 2, curve.until if self._ended_at is None else self._ended_at)
        return Scales(scale, 1.0 if curve.weight_decay is None else curve.weight_decay * scale)

    def accept(self, loss: float) -> str:
        """Take in the loss of an accepted gradient; return why the warm-up ends with it, or nothing."""
        self._accepted += 1
        if self._ended_at is not None:
            return ""
        reason = self._look(loss) if self._curve.check_every else ""
        end = float(self._accepted)
        if not reason and self._accepted >= self._curve.until:
            reason, end = "as far as it was to go", self._curve.until
        if reason:
            self._ended_at = end
            reason = f"ends after {end:.12g} gradients at {end / self._curve.warm_up:.4g} of the full rate: {reason}"
        return reason

    def _look(self, loss: float) -> str:
        every, window = self._curve.check_every, self._curve.window
        since_check = self._accepted % every or every
        if since_check > every - window:
            self._sum += loss
        if since_check < every:
            return ""
        before, now = self._before, self._sum / window
        self._before, self._sum = now, 0.0
        if before is None or not is_plateau(before, now, self._curve.least_reduction):
            return ""
        return f"plateau, a mean loss of {now:.6g} after {before:.6g} {every} gradients before"

    def state_dict(self) -> dict[str, Any]:
        """Return how far it is."""
        return snapshot(self, _SAVED)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state; in a run of another length too, a warm-up that has ended stays ended."""
        restore(self, _SAVED, state)


_SAVED = ("_accepted", "_ended_at", "_sum", "_before")


def is_plateau(before: float, now: float, least_reduction: float = 0.0) -> bool:
    """Return whether a loss has not fallen by more than this share of it: before - now <= least_reduction |before|.

    >>> is_plateau(before=2.0, now=1.99), is_plateau(before=2.0, now=1.99, least_reduction=0.01)
    (False, True)
    """
    return before - now <= least_reduction * abs(before)
