"""Summary of the runs: the headline, and the row of each run."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from statistics import mean
from typing import Any

from paceline.core.stop import TARGETS
from paceline.core.targets import Target
from paceline.report.curves import Group, metric_title
from paceline.report.run_data import RunData
from paceline.utils.wording import counted


def row(run: RunData) -> dict[str, Any]:
    """Return the cells of a run by column; unknown numbers are None."""
    stats = run.stats
    has_updates = stats.updates > 0
    return {
        "protocol": run.protocol,
        **({"seed": run.seed} if run.seed is not None else {}),
        "outcome": run.outcome,
        "seconds": stats.time_s,
        "updates": stats.updates,
        "mean k": stats.mean_k if has_updates else None,
        "used": stats.used,
        "dropped": stats.dropped,
        "interrupted": stats.interrupted,
        "mean staleness": stats.mean_staleness if has_updates else None,
        "idle": max(0.0, stats.idle_share) if isfinite(stats.idle_share) else None,
        "final loss": known(stats.loss),
        **{metric_title(name): known(value) for name, value in stats.metrics.items()},
    }


def known(value: float) -> float | None:
    """Return a number, None if it is not a finite one."""
    return value if isfinite(value) else None


def headline(groups: Sequence[Group]) -> str:
    """Return the result as a sentence: the fastest protocol to the target, or the final values."""
    runs = [run for group in groups for run in group.runs]
    job = runs[0].run.configuration.get("job", "?")
    if not any(run.stats.updates for run in runs):
        return f"{job}: no update yet"
    if len(runs) == 1:
        return f"{job} with {runs[0].protocol}: {_arrived_at(runs[0])}"
    there = [group for group in groups if all(run.stats.stopped_by in TARGETS for run in group.runs)]
    if len(groups) > 1 and there:
        return f"{job}: {_race(there, [group.label for group in groups if group not in there])}"
    return f"{job}: {counted(len(runs), 'run')} of {counted(len(groups), 'protocol')}{_best(groups)}"


def _arrived_at(run: RunData) -> str:
    stats = run.stats
    if run.shares is not None and stats.updates:
        failed = f", {run.outcome}" if stats.failed or not run.has_ended else ""
        return ", ".join([f"{run.shares.gain}{failed}", *final_values(run)])
    outcome = stats.reason if run.has_ended else f"{run.outcome}, with {counted(stats.updates, 'update')}"
    return ", ".join([f"{outcome} after {number(stats.time_s)} s", *final_values(run)])


def final_values(run: RunData) -> list[str]:
    """Return the latest loss, target metrics and accuracy of a run, as far as they are known."""
    stats = run.stats
    loss = known(stats.loss)
    parts = [f"loss {number(loss)}"] if loss is not None else []
    asked = [target.metric for target in run.evaluated]
    for name in [*asked, *({"accuracy"} - {*asked})]:
        value = known(stats.metrics.get(name, nan))
        shown = f"{value:.1%}" if value is not None and name == "accuracy" else value is not None and number(value)
        parts += [f"{metric_title(name)} {shown}"] if shown else []
    return parts


def _race(groups: Sequence[Group], others: Sequence[str]) -> str:
    """Return which group reached the target first, as the verdict of `compare`, and which others missed it."""
    times = sorted((mean(run.stats.time_s for run in group.runs), group.label) for group in groups)
    (best_s, winner), *later = times
    behind = [f"{time_s / best_s:.1f} x faster than {label}" for time_s, label in later if best_s > 0]
    behind += [f"while {label} missed it" for label in others]
    mean_of = " on average" if any(len(group.runs) > 1 for group in groups) else ""
    goals = {run.stop.goal for group in groups for run in group.runs if run.stop}
    target = goals.pop() if len(goals) == 1 else "the target"
    return ", ".join([f"{winner} reached {target} first, in {number(best_s)} s{mean_of}", *behind])


def _best(groups: Sequence[Group]) -> str:
    """Return the group with the best final mean of the target metric, or of the training loss without a target."""
    target = _common_target(groups)
    means = []
    for group in groups:
        finals = [run.stats.metrics.get(target.metric, nan) if target else run.stats.loss for run in group.runs]
        means += [(mean(finals), group.label)] if all(map(isfinite, finals)) else []
    if not means:
        return ""
    is_highest = target is not None and target.comparison == ">="
    value, label = (max if is_highest else min)(means)
    name = metric_title(target.metric) if target else "loss"
    best = f"{label} ended with the {'highest' if is_highest else 'lowest'} mean {name}"
    return f"; {best if len(groups) > 1 else f'mean final {name}'}, {number(value)}"


def _common_target(groups: Sequence[Group]) -> Target | None:
    """Return the first target on a metric that all runs have a target for."""
    asked = [run.evaluated for group in groups for run in group.runs]
    common = [target for target in asked[0] if all(target.metric in {each.metric for each in one} for one in asked)]
    return common[0] if common else None


def number(value: float) -> str:
    """Return four significant digits, or all digits of a large number.

    >>> number(0.123456), number(47010.2), number(3008353.78)
    ('0.1235', '47,010', '3,008,354')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
