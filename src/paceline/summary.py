"""Results as people and as machines read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from paceline.events import Outcome
from paceline.train import Result


def summary(result: Result) -> dict[str, Any]:
    """Return the figures of a run, as plain values."""
    totals = result.history.totals
    return {
        "stopped_by": str(result.stopped_by),
        "reason": result.reason,
        "time_s": result.time_s,
        "updates": totals.updates,
        "updates_per_s": totals.updates / result.time_s if result.time_s else None,
        "used": totals.used,
        "dropped": totals.dropped,
        "interrupted": totals.interrupted,
        "samples_applied": totals.samples_used,
        "samples_dropped": totals.samples_dropped,
        "mean_k": totals.mean_k,
        "mean_staleness": totals.mean_staleness,
        "idle_share": totals.idle_share,
        "metrics": dict(result.metrics),
        "folder": str(result.folder) if result.folder else None,
    }


def comparison(results: Mapping[str, Result]) -> Table:
    """Return a table of runs toward the same target loss, a row a protocol, for 80 columns."""
    table = Table(pad_edge=False, box=None, header_style="bold")
    table.add_column("protocol", no_wrap=True)
    headings = (
        "seconds to\ntarget",
        "updates\n/s",
        "test\naccuracy",
        "gradients\nused",
        "\ndropped",
        "inter-\nrupted",
        "idle\nshare",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in results.items():
        figures = summary(result)
        reached = result.stopped_by is Outcome.LOSS
        table.add_row(
            name,
            f"{result.time_s:.2f}" if reached else "not reached",
            f"{figures['updates_per_s'] or 0:.1f}",
            f"{result.metrics['accuracy']:.3f}" if "accuracy" in result.metrics else "",
            str(figures["used"]),
            str(figures["dropped"]),
            str(figures["interrupted"]),
            f"{figures['idle_share']:.0%}",
        )
    return table


def verdict(results: Mapping[str, Result]) -> str:
    """Say which protocol reached the target first, and by how much."""
    reached = [(result.time_s, name) for name, result in results.items() if result.stopped_by is Outcome.LOSS]
    if not reached:
        return "No protocol reached the target loss."
    (best_s, winner), *others = sorted(reached)
    missed = [name for name in results if name not in {name for _, name in reached}]
    behind = [f"{time_s / best_s:.1f} x faster than {name}" for time_s, name in others]
    behind += [f"while {name} did not reach it" for name in missed]
    return f"{winner} won: target loss in {best_s:.2f} s{_listed(behind)}."


def _listed(parts: Sequence[str]) -> str:
    return ", " + ", ".join(parts) if parts else ""
