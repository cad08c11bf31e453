"""The report in words and numbers: a headline, a row a run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np

from paceline.events import Outcome
from paceline.report.curves import Group, smooth_loss
from paceline.report.reading import STILL_GOING, RunData

TARGETS = (Outcome.LOSS, Outcome.ACCURACY)


def row(run: RunData) -> dict[str, Any]:
    """Return what the table says of a run; numbers that are not known are None."""
    totals = run.totals
    has_updates = totals.updates > 0
    return {
        "protocol": run.protocol,
        "seed": run.seed,
        "outcome": run.outcome,
        "seconds": run.time_s,
        "updates": totals.updates,
        "mean k": totals.mean_k if has_updates else None,
        "used": totals.used,
        "dropped": totals.dropped,
        "interrupted": totals.interrupted,
        "mean staleness": totals.mean_staleness if has_updates else None,
        "idle": None if np.isnan(totals.idle_share) else max(0.0, totals.idle_share),
        "final loss": final_loss(run),
        "accuracy": final_accuracy(run),
    }


def final_loss(run: RunData) -> float | None:
    """Return the mean loss of the last gradients, None if it is not a number."""
    last = smooth_loss(run)[-1:]
    return float(last[0]) if np.isfinite(last).all() and len(last) else None


def final_accuracy(run: RunData) -> float | None:
    """Return the latest accuracy that was measured."""
    measured = [e.metrics["accuracy"] for e in run.evaluations if "accuracy" in e.metrics]
    return measured[-1] if measured and np.isfinite(measured[-1]) else None


def headline(groups: Sequence[Group]) -> str:
    """Say in a sentence what came out: who was first at the target, or where the runs got to."""
    runs = [run for group in groups for run in group.runs]
    job = runs[0].run.configuration.get("job", "?")
    if not any(run.totals.updates for run in runs):
        return f"{job}: no update was made, so there is nothing to show yet"
    if len(runs) == 1:
        return f"{job} with {runs[0].protocol}: {_arrived_at(runs[0])}"
    if len(groups) > 1 and all(run.end and run.end.outcome in TARGETS for run in runs):
        return f"{job}: {_race(groups)}"
    return f"{job}: {len(runs)} runs of {_count(len(groups), 'protocol')}{_lowest(groups)}"


def _arrived_at(run: RunData) -> str:
    outcome = run.end.reason if run.end else f"{STILL_GOING}, with {_count(run.totals.updates, 'update')}"
    parts = [f"{outcome} after {number(run.time_s)} s"]
    loss, accuracy = final_loss(run), final_accuracy(run)
    parts += [f"loss {number(loss)}"] if loss is not None else []
    parts += [f"accuracy {accuracy:.1%}"] if accuracy is not None else []
    return ", ".join(parts)


def _race(groups: Sequence[Group]) -> str:
    times = sorted((mean(run.time_s for run in group.runs), group.label) for group in groups)
    (best_s, winner), *others = times
    behind = ", ".join(f"{time_s / best_s:.1f} x faster than {label}" for time_s, label in others if best_s > 0)
    mean_of = " on average" if any(len(group.runs) > 1 for group in groups) else ""
    return f"{winner} reached the target first, in {number(best_s)} s{mean_of}, {behind}"


def _lowest(groups: Sequence[Group]) -> str:
    losses = []
    for group in groups:
        known = [loss for run in group.runs if (loss := final_loss(run)) is not None]
        losses += [(mean(known), group.label)] if len(known) == len(group.runs) else []
    if not losses:
        return ""
    loss, label = min(losses)
    best = f"{label} ended with the lowest mean loss" if len(groups) > 1 else "mean final loss"
    return f"; {best}, {number(loss)}"


def number(value: float) -> str:
    """Return four significant digits, or all digits of a large number.

    >>> number(0.123456), number(47010.2), number(3008353.78)
    ('0.1235', '47,010', '3,008,354')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _count(amount: int, thing: str) -> str:
    return f"{amount:,} {thing}{'s' if amount != 1 else ''}"
