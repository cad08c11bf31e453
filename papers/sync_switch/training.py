"""The training runs of all figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan

import paceline as pl
from paceline.core.records import DecisionMade, UpdateMade, VersionEvaluated
from papers.command import seed_by_seed
from papers.store import Line, key, rounded
from papers.sync_switch.jobs import make_job
from papers.sync_switch.settings import FIGURES, Series, Setup
from papers.tasks import Where, unbroken

LOSSES = 100  # points of a curve of the training loss
DECISIONS = {"protocol", "set_aside", "take_back"}  # kinds of decisions that are kept


@dataclass(frozen=True)
class Run:
    """One run: all settings that its result depends on, without the figures that show it."""

    setup: Setup
    series: Series
    seed: int

    def asked(self) -> Line:
        """Return the fields as plain JSON; equal runs have equal fields."""
        setup, series = self.setup, self.series
        batch_size = series.batch_size or setup.batch_size
        return {
            "job": setup.job,
            "series": series.name,
            "cluster": str(setup.cluster_for(batch_size)),
            "batch_size": batch_size,
            "lr": series.lr or setup.lr,
            "workload": setup.workload * setup.batch_size // batch_size,
            "evaluations": setup.evaluations,
            "seed": self.seed,
        }

    def carry_out(self, where: Where) -> Line:
        """Train, and return the result line."""
        asked = self.asked()
        workload = asked["workload"]
        result = unbroken(
            pl.train(
                make_job(self.setup, asked["lr"], asked["batch_size"], workload, where.folder),
                protocol=self.series.protocol,
                cluster=replace(self.setup.cluster_for(asked["batch_size"]), device=where.device),
                stop=pl.Stop(gradients=workload, updates=where.updates),
                evaluate_every=pl.plans.Duration("gradients", workload / asked["evaluations"]),
                seed=self.seed,
            )
        )
        return result_line(result)


def result_line(result: pl.results.Result) -> Line:
    """Return the end of a run, its curves by time and workload, and its decisions."""
    history = result.history
    updates, curve = history.of(UpdateMade), history.of(VersionEvaluated)
    workloads = {update.version: update.workload for update in updates}
    every = max(1, len(updates) // LOSSES)
    return {
        "time_s": round(result.time_s, 4),
        "stopped_by": result.stopped_by.name.lower(),
        "accuracy": round(float(result.metrics.get("accuracy", nan)), 5),
        "updates": len(updates),
        "mean_k": round(history.totals.mean_k, 3),
        "mean_staleness": round(history.totals.mean_staleness, 3),
        "decisions": decisions(history),
        "test_s": rounded(each.published_s for each in curve),
        "test_workload": [workloads.get(each.version, 0) for each in curve],
        "test_loss": rounded(each.metrics["loss"] for each in curve),
        "test_accuracy": rounded(each.metrics["accuracy"] for each in curve),
        "train_workload": [update.workload for update in updates[every - 1 :: every]],
        "train_loss": rounded(
            sum(update.loss for update in updates[i : i + every]) / every
            for i in range(0, len(updates) - every + 1, every)
        ),
    }


def decisions(history: pl.results.History) -> list[tuple[float, int, str, int | None]]:
    """Return the changes of protocol and membership: time, number of gradients, and worker."""
    found, workload = [], 0
    for record in history:
        match record:
            case UpdateMade():
                workload = record.workload
            case DecisionMade() if record.kind in DECISIONS:
                found.append((round(record.now_s, 2), workload, record.kind, record.worker))
    return found


def runs(figure: str, seeds: int | None, only: str = "") -> Iterator[Run]:
    """Yield the runs of a figure; for the arguments see `seed_by_seed`."""
    cases = FIGURES[figure].cases
    for name, series, seed in seed_by_seed(cases, seeds, only):
        yield Run(cases[name].setup, series, seed)


def lines_of(setup: Setup, series: Sequence[Series], lines: Sequence[Line]) -> list[Line]:
    """Return the lines of the runs of a set-up, independent of their figure, in the order of the series."""
    seeds = range(max((line["asked"]["seed"] for line in lines), default=-1) + 1)
    by_key = {key(line["asked"]): line for line in lines}
    wanted = [key(Run(setup, each, seed).asked()) for each in series for seed in seeds]
    return [by_key[each] for each in wanted if each in by_key]
