"""Failures by script: what goes wrong at which draw of which worker, on any engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError
from paceline.utils.argument_types import checked_types

KINDS = ("die", "raise", "hang", "not_finite")


@checked_types
@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, once.

    Args:
        worker: whom it befalls.
        draw: during which piece of its work, counted from 1; one that is interrupted before it begins befalls
            nothing, so under a protocol that interrupts only the first is sure to be reached.
        kind: the worker is killed ("die"), has an exception ("raise"), falls silent ("hang"), or hands in a
            gradient that is not a number ("not_finite"). A simulated worker that hangs is lost after
            `worker_timeout_s`, or, if that is not given, when no other worker computes any more.
        back_after_s: simulated seconds after which a dead worker joins again, None for never; on real processes
            `LocalCluster(respawn=True)` brings it back.
    """

    worker: int
    draw: int
    kind: Literal["die", "raise", "hang", "not_finite"] = "die"
    back_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.worker < 0 or self.draw < 1:
            raise UsageError(f"{self}: expected worker >= 0 and draw >= 1")


def check_faults(faults: Sequence[Fault], n: int) -> None:
    """Refuse faults of workers that are not there."""
    for fault in faults:
        if fault.worker >= n:
            raise UsageError(f"{fault}: the cluster has workers 0 to {n - 1}")
