"""Table of the predicted runtime and staleness of protocols, 80 columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from paceline.clusters.simulated import Cluster
from paceline.protocols.protocol import Plan, Protocol
from paceline.theory import Expected, NoTheoryError, Staleness, Tradeoff, expected, staleness
from paceline.utils.text_table import NONE, TextTable, number, paragraph

HEADINGS = ("s per\nupdate", "kind", "mean\nstaleness", "fresh\nshare", "gradients\nper s", "source")
SIMULATED: Literal["simulated"] = "simulated"


@dataclass(frozen=True, kw_only=True)
class TheoryRow:
    """Prediction for one protocol.

    Attributes:
        name: text of the plan.
        protocol: first protocol of the plan.
        runtime: expected or simulated seconds per update; its source is the lemma, or the reason why there is none.
        gradients_per_s: gradients per second that enter updates.
        staleness: distribution of the gradients' staleness; lower and upper bound are equal after a simulation. None
            for algorithms in which each worker applies its own gradients.
    """

    name: str
    protocol: Protocol
    runtime: Expected
    gradients_per_s: float
    staleness: Staleness | None

    @property
    def has_theory(self) -> bool:
        """Whether theory gives the prediction, not a simulation."""
        return self.runtime.kind != SIMULATED

    def as_json(self) -> dict[str, Any]:
        """Return the prediction as plain values."""
        return {
            "protocol": self.name,
            **{name: getattr(self.runtime, name) for name in ("seconds_per_update", "lower_s", "upper_s")},
            **{name: getattr(self.runtime, name) for name in ("kind", "source")},
            "mean_staleness": self.staleness and self.staleness.mean,
            **{name: getattr(self.staleness, name, None) for name in ("fresh_lower", "fresh_upper")},
            "updates_per_s": self.runtime.updates_per_s,
            "gradients_per_s": self.gradients_per_s,
        }


def predict(plan: Plan, cluster: Cluster, updates: int, seed: int) -> TheoryRow:
    """Predict a protocol from theory; where there is none, simulate it for this number of updates."""
    try:
        runtime, stale = expected(plan, cluster), staleness(plan, cluster)
    except NoTheoryError as error:
        return _simulated(plan, cluster, updates, seed, str(error).partition(";")[0])
    return TheoryRow(
        name=str(plan),
        protocol=plan.phases[0].protocol,
        runtime=runtime,
        gradients_per_s=runtime.gradients_per_s,
        staleness=stale,
    )


def as_text(rows: Sequence[TheoryRow], curves: Tradeoff | None, simulation: str) -> str:
    """Return the table, its notes, and the best protocol at each time."""
    grid = TextTable(["protocol", *HEADINGS], [[row.name, *_cells(row)] for row in rows], left=(0, 2, 6))
    notes = [*_notes(rows, simulation), *([_when(curves)] if curves is not None else [])]
    blocks = ["\n".join(grid.text()), *(["\n".join(map(paragraph, notes))] if notes else [])]
    return "\n\n".join(blocks) + "\n"


def _simulated(plan: Plan, cluster: Cluster, updates: int, seed: int, why: str) -> TheoryRow:
    from paceline.run.simulate import simulate  # imports torch

    simulated = simulate(plan, cluster, updates=updates, seed=seed)
    totals, seconds = simulated.totals, simulated.seconds_per_update
    fresh = totals.staleness[0] / totals.used
    steps_apart = plan.allreduce is not None and plan.allreduce.sums == "updates"
    stale = None if steps_apart else Staleness(mean=totals.mean_staleness, fresh_lower=fresh, fresh_upper=fresh)
    runtime = Expected(
        seconds_per_update=seconds, kind=SIMULATED, source=why, lower_s=seconds, upper_s=seconds, k=round(totals.mean_k)
    )
    return TheoryRow(
        name=str(plan),
        protocol=plan.phases[0].protocol,
        runtime=runtime,
        gradients_per_s=totals.mean_k / seconds,
        staleness=stale,
    )


def _cells(row: TheoryRow) -> list[str]:
    runtime = row.runtime
    seconds = number(runtime.seconds_per_update)
    return [
        f"<={seconds}" if runtime.kind == "upper bound" else seconds,
        {"upper bound": "bound", SIMULATED: NONE}.get(runtime.kind, runtime.kind),
        number(row.staleness.mean) if row.staleness else NONE,
        _fresh(row.staleness) if row.staleness else NONE,
        number(row.gradients_per_s),
        runtime.source if row.has_theory else SIMULATED,
    ]


def _fresh(stale: Staleness) -> str:
    """Return the share of fresh gradients, or its bounds.

    >>> bounds = ((0.25, 0.25), (0.0, 0.5), (0.5, 1.0), (0.25, 0.5), (0, 1))
    >>> [_fresh(Staleness(mean=1.0, fresh_lower=lower, fresh_upper=upper)) for lower, upper in bounds]
    ['0.250', '<=0.50', '>=0.50', '0.25-0.50', '-']
    """
    lower, upper = stale.fresh_lower, stale.fresh_upper
    if lower == upper:
        return number(lower)
    if (lower, upper) == (0, 1):
        return NONE
    if upper == 1:
        return f">={lower:.2f}"
    return f"<={upper:.2f}" if lower == 0 else f"{lower:.2f}-{upper:.2f}"


def _notes(rows: Sequence[TheoryRow], simulation: str) -> list[str]:
    notes = [
        f"{row.name}: {number(row.runtime.lower_s)} to {number(row.runtime.upper_s)} s per update; "
        "rates are at the bound."
        for row in rows
        if row.runtime.kind == "upper bound"
    ]
    notes += [
        f"{row.name}: computed; the expectation is between {row.runtime.lower_s:.4g} and {row.runtime.upper_s:.4g} s "
        "per update."
        for row in rows
        if row.runtime.kind == "computed"
    ]
    reasons = dict.fromkeys(row.runtime.source for row in rows if not row.has_theory)
    return notes + [f"{why[0].upper()}{why[1:]}: {SIMULATED}, {simulation}." for why in reasons]


def _when(curves: Tradeoff) -> str:
    """Return a sentence that names the protocol with the smallest error bound in each interval of time."""
    later = zip(curves.best[1:], curves.times_s[1:], strict=True)  # all bounds are equal at time 0
    *firsts, (last, _) = [(name, list(times)) for name, times in groupby(later, itemgetter(0))]
    parts = [f"{name} until {number(float(times[-1][1]))} s" for name, times in firsts]
    seconds = [f"{name}: {number(curves.runtimes[name].seconds_per_update)} s" for name in curves.simulated]
    simulated = f" Simulated times of an update in these bounds: {', '.join(seconds)}." if seconds else ""
    return f"Smallest error bound: {', then '.join([*parts, last])}.{simulated}"
