"""Measured comparisons with DDP, by the slowness pattern of the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline.clusters.timing.trace import Trace
from paceline.policies.estimators.speeds.slowness_pattern import SlownessPattern, slowness_pattern


class Evidence(NamedTuple):
    """Comparison with DDP on clusters with one slowness pattern.

    Attributes:
        pattern: name of the pattern, and of its page in docs/evidence.
        seen: pattern as a user sees it.
        typed: what to type there, for n workers.
    """

    pattern: SlownessPattern
    seen: str
    typed: str

    @property
    def sentence(self) -> str:
        """Sentence that names the comparison."""
        return (
            f"The nearest cluster that was compared with DDP: {self.seen}. There, type {self.typed}; the page "
            f"evidence/{self.pattern} of the documentation has the numbers."
        )


EVIDENCE: Mapping[SlownessPattern, Evidence] = {
    each.pattern: each
    for each in (
        Evidence("none", "no worker is slow", "bsp, or use DDP"),
        Evidence("half", "one worker has half the speed", "k_sync(k=n-1), or use DDP without that worker"),
        Evidence("quarter", "one worker has a quarter of the speed", "k_sync(k=n-1), or use DDP without that worker"),
        Evidence("rotating", "another worker is slow every 20 round trips", "k_sync(k=n-1) or auto"),
        Evidence("transient", "5 % of the gradients are slow, on any worker", "k_sync(k=n-1) or auto"),
        Evidence("ladder", "the workers have speeds from 1 to 1/3", "auto"),
    )
}


def nearest_evidence(trace: Trace) -> Evidence:
    """Return the comparison with DDP that is nearest to the computing times of a trace, with its number of workers.

    A worker whose work was always interrupted has the seconds until then.
    """
    finished: list[list[float]] = [[] for _ in range(trace.workers)]
    interrupted: list[list[float]] = [[] for _ in range(trace.workers)]
    for row in trace.rows:
        (interrupted if row.censored else finished)[row.worker].append(row.compute_s)
    times_s = [own or until for own, until in zip(finished, interrupted, strict=True) if own or until]
    nearest = EVIDENCE[slowness_pattern(times_s)]
    return nearest._replace(typed=nearest.typed.replace("n-1", str(trace.workers - 1)))
