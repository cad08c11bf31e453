"""Learning-rate scaling by the number of gradients of an update, and learning-rate schedules by workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.duration import Duration
from paceline.errors import UsageError
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.spec_parser import short_repr
from paceline.utils.state_dict import Stateful
from paceline.utils.validation import check_optional_range, check_range
from paceline.utils.wording import join_words


@dataclass(frozen=True)
class LRScaling:
    """Learning-rate scaling: factor on the optimizer's rate for an update of k gradients with n live workers.

    eta(k) = eta_max ("constant") or eta_max * k / n ("proportional"), where eta_max is the rate of the optimizer
    ("total") or n times it ("per_worker"). The factor of the rule "noise" depends on the gradients: see `NoiseRule`.

    Args:
        rule: dependence on k, "constant", "proportional" or "noise".
        lr_is: meaning of the rate of the optimizer, "total" or "per_worker".

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
        if self.rule not in LR_RULES:
            raise UsageError(f"lr_rule={self.rule!r}, expected {join_words([repr(each) for each in LR_RULES], 'or')}")
        if self.lr_is not in {"total", "per_worker"}:
            raise UsageError(f"lr_is={self.lr_is!r}, expected 'total' or 'per_worker'")
        if self.rule == "noise" and self.lr_is == "per_worker":
            raise UsageError(
                "lr_rule='noise' with lr_is='per_worker': the rule takes the rate of a whole update; give the "
                "rate that was tuned for BSP, or lr_of=K if it was tuned for updates of K gradients"
            )

    def scale(self, k: int, n: int) -> float:
        """Return eta(k) divided by the rate of the optimizer, for k gradients and n workers, both >= 1.

        The rule "noise" has no such factor: it is 1.
        """
        share = k / n if self.rule == "proportional" else 1.0
        return share * n if self.lr_is == "per_worker" else share


LR_RULES = ("constant", "proportional", "noise")
PLATEAU = "plateau"


class Scales(NamedTuple):
    """Factors of one update on the learning rate and the weight decay of the optimizer."""

    lr: float = 1.0
    weight_decay: float = 1.0


@checked_dataclass(frozen=True, kw_only=True)
class LinearSchedule:
    """Linear warm-up, which a plateau of the training loss may end, and linear decay, both by workload.

    After w accepted gradients, scale(w) = w / warm_up while w < end. After the end of the warm-up,
    scale(w) = end / warm_up * (total - w) / (total - end). The learning rate is multiplied by the scale, in addition to
    `LRScaling`, and the weight decay by ``weight_decay`` times the scale. An update that takes the workload from w to
    w + k has scale(w + k/2), the mean over its gradients. So a schedule means the same under every protocol.

    The loss is checked every ``check_every``. If the mean training loss of the last epoch is not less than at the
    check before (``is_plateau``), the warm-up ends. So it ends at the second check at the earliest.

    Args:
        warm_up: workload after which the scale would reach 1, for example "50%", "epochs=5", "gradients=500" or a
            `Duration`.
        warm_up_until: end of the warm-up: "plateau", a workload, or None for its full length. Without a plateau it
            ends at its full length.
        check_every: workload between two checks of the loss.
        least_reduction: share by which the loss must have fallen at a check, in [0, 1).
        weight_decay: factor k on the weight decay, >= 0; None for no change.
        total: workload at which the scale reaches 0; that of the run if not given.

    Raises:
        UsageError: a duration is not in units of workload, or a number is out of its range.

    Example:
        >>> curve = LinearSchedule(warm_up="epochs=45", warm_up_until="epochs=15").in_gradients(9000, per_epoch=100)
        >>> [round(curve.scale(100 * epoch, end=curve.until), 3) for epoch in (0, 5, 15, 90)]
        [0.0, 0.111, 0.333, 0.0]

    Source: Rigazzi, "DC-S3GD", 2019, Sect. IV-A: a warm-up of half the iterations, ended by hand after 15 or 20 of 90
    epochs; a check every five epochs is proposed as future work; the same schedule on weight decay, times k = 2.3.
    The rate eta = N eta_single of the paper is lr_rule="proportional" with lr_is="per_worker".

    Differs from the paper: it checks the training error, and paceline the training loss. "Error reduction" is any
    reduction of the mean over one epoch since the check before. The paper leaves open at which point of an iteration
    the rate is taken; in the middle it is never 0.
    """

    warm_up: str | Duration = "50%"
    warm_up_until: str | Duration | None = PLATEAU
    check_every: str | Duration = "epochs=5"
    least_reduction: float = 0.0
    weight_decay: float | None = 2.3
    total: str | Duration | None = None

    def __post_init__(self) -> None:
        self._duration("warm_up")
        self._duration("check_every")
        if self.warm_up_until not in (None, PLATEAU):
            self._duration("warm_up_until")
        if self.total is not None:
            self._duration("total")
        check_range("[0, 1)", least_reduction=self.least_reduction)
        check_optional_range("[0, inf)", weight_decay=self.weight_decay)

    def __repr__(self) -> str:
        return short_repr(self)

    def in_gradients(self, total: float | None, per_epoch: float | None) -> ScheduleCurve:
        """Return the schedule in gradients.

        Args:
            total: number of gradients of the whole run; None if the stop does not fix it.
            per_epoch: number of gradients of one epoch; None if the data have no length.

        Raises:
            UsageError: the end of the schedule is unknown, or a part is longer than the whole.
        """
        end = self._gradients("total", total, per_epoch) if self.total is not None else total
        if end is None:
            raise UsageError(
                f"{self}: the stop does not fix the workload at which the learning rate reaches 0; add epochs= or "
                "gradients= to the stop, or give the schedule a total, for example total='epochs=90'"
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
        return ScheduleCurve(
            warm_up=warm_up,
            until=until,
            total=end,
            weight_decay=self.weight_decay,
            check_every=every,
            window=window,
            least_reduction=self.least_reduction,
        )

    def _gradients(self, name: str, total: float | None, per_epoch: float | None) -> float:
        return self._duration(name).in_gradients(total, per_epoch).amount

    def _duration(self, name: str) -> Duration:
        given = getattr(self, name)
        duration = Duration.parse(given) if isinstance(given, str) else given
        if duration.unit in {"updates", "seconds"}:
            raise UsageError(
                f"schedule: {name}={given!r}, expected a workload, for example '50%', 'epochs=5' or 'gradients=500'"
            )
        return duration

    def _check_order(self, name: str, end: float, inner: str, inner_end: float) -> None:
        if inner_end > end:
            raise UsageError(
                f"{self}: {name} is {end:.12g} gradients, but {inner} ends at {inner_end:.12g}; shorten {inner}"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleCurve:
    """Linear schedule in numbers of gradients.

    Attributes:
        warm_up: gradients after which the scale would reach 1.
        until: gradients after which the warm-up ends, unless a plateau ends it before.
        total: gradients after which the scale reaches 0.
        weight_decay: factor on the weight decay, >= 0; None for no change.
        check_every: gradients between two checks of the loss; 0 for no checks.
        window: gradients whose mean loss is checked, >= 1.
        least_reduction: share by which this loss must have fallen, in [0, 1).
    """

    warm_up: float
    until: float
    total: float
    weight_decay: float | None
    check_every: int
    window: int
    least_reduction: float

    def scale(self, workload: float, end: float) -> float:
        """Return the scale at a workload, in [0, 1], for a warm-up that ends at `end`, both in gradients."""
        if workload < end:
            return workload / self.warm_up
        left = max(0.0, self.total - workload) / (self.total - end) if end < self.total else 0.0
        return end / self.warm_up * left


class ScheduleTracker(Stateful):
    """State of a schedule during a run: the workload so far, and the end of the warm-up.

    Args:
        curve: schedule in gradients.
    """

    _saved = ("_accepted", "_ended_at", "_sum", "_before")

    def __init__(self, curve: ScheduleCurve) -> None:
        self._curve = curve
        self._accepted = 0
        self._ended_at: float | None = None
        self._sum = 0.0  # losses in the window before the next check
        self._before: float | None = None  # mean at the latest check

    def scales(self, workload: int, k: int) -> Scales:
        """Return the scales of an update of k gradients after a workload in gradients."""
        curve = self._curve
        # At the middle of its gradients, so that quorums of any size move the rate equally (decision 0018).
        scale = curve.scale(workload + k / 2, curve.until if self._ended_at is None else self._ended_at)
        return Scales(scale, 1.0 if curve.weight_decay is None else curve.weight_decay * scale)

    def accept(self, loss: float) -> str:
        """Add the loss of an accepted gradient; return the reason if the warm-up ends with it, else an empty text."""
        self._accepted += 1
        if self._ended_at is not None:
            return ""
        reason = self._check(loss) if self._curve.check_every else ""
        end = float(self._accepted)
        if not reason and self._accepted >= self._curve.until:
            reason, end = "end of the warm-up", self._curve.until
        if reason:
            self._ended_at = end
            reason = f"ends after {end:.12g} gradients at {end / self._curve.warm_up:.4g} of the full rate: {reason}"
        return reason

    def _check(self, loss: float) -> str:
        every, window = self._curve.check_every, self._curve.window
        since_check = self._accepted % every or every
        if since_check > every - window:
            self._sum += loss
        if since_check < every:
            return ""
        before, now = self._before, self._sum / window
        self._before = now
        self._sum = 0.0
        if before is None or not is_plateau(before, now, self._curve.least_reduction):
            return ""
        return f"plateau, a mean loss of {now:.6g} after {before:.6g} {every} gradients before"


def is_plateau(before: float, now: float, least_reduction: float = 0.0) -> bool:
    """Return whether a loss has not fallen by more than this share of it: before - now <= least_reduction |before|.

    >>> is_plateau(before=2.0, now=1.99), is_plateau(before=2.0, now=1.99, least_reduction=0.01)
    (False, True)
    """
    return before - now <= least_reduction * abs(before)
