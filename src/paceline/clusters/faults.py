"""Scripted fault injection: a failure at a given draw of a given worker, on any engine."""

from collections.abc import Sequence
from typing import Literal

from paceline.errors import UsageError
from paceline.utils.checked_dataclass import checked_dataclass

KINDS = ("die", "raise", "hang", "not_finite")


@checked_dataclass(frozen=True, kw_only=True)
class Fault:
    """One scripted fault.

    Args:
        worker: id of the worker, >= 0.
        draw: number of the gradient computation in which the fault occurs, >= 1. A draw that is interrupted before it
            begins has no fault, so under an interrupting protocol only the first draw is sure to be reached.
        kind: "die" kills the worker, "raise" raises an exception in it, "hang" makes it stop responding, and
            "not_finite" makes it send a gradient with nan. A simulated worker that hangs is lost after
            the timeout of silent workers; without one, when no other worker computes.
        step: local step before which it occurs, >= 1, where a real worker makes local steps; "not_finite" and simulated
            faults are those of the whole draw.
        back_after_s: simulated seconds after which a killed worker joins again, >= 0; None for never. Real processes
            are restarted by ``LocalCluster(respawn=True)``.
    """

    worker: int
    draw: int
    kind: Literal["die", "raise", "hang", "not_finite"] = "die"
    back_after_s: float | None = None
    step: int = 1

    def __post_init__(self) -> None:
        if self.worker < 0 or self.draw < 1 or self.step < 1:
            raise UsageError(f"{self}: expected worker >= 0, draw >= 1 and step >= 1")


def check_faults(faults: Sequence[Fault], n: int) -> None:
    """Raise a UsageError for a fault of a worker that is not among the n workers."""
    for fault in faults:
        if fault.worker >= n:
            raise UsageError(f"{fault}: the cluster has workers 0 to {n - 1}")
