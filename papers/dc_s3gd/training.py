"""The training runs of all figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan

import paceline as pl
from paceline.core.records import UpdateMade, VersionEvaluated
from papers.command import seed_by_seed
from papers.dc_s3gd.jobs import make_job
from papers.dc_s3gd.settings import FIGURES, Case, Series, Setup
from papers.store import Line, key, rounded
from papers.tasks import Where, unbroken


@dataclass(frozen=True)
class Run:
    """One run: all settings that its result depends on, without the figures that show it."""

    setup: Setup
    series: Series
    seed: int

    def asked(self) -> Line:
        """Return the fields as plain JSON; equal runs have equal fields."""
        setup = self.setup
        return {
            "job": setup.job,
            "series": self.series.name,
            "workers": setup.n,
            "batch_size": setup.batch_size,
            "lr": setup.lr,
            "updates": setup.updates,
            "schedule": str(setup.schedule),
            "evaluations": setup.evaluations,
            "seed": self.seed,
            **({"optimizer": setup.optimizer} if setup.optimizer != "sgd" else {}),
        }

    def carry_out(self, where: Where) -> Line:
        """Train, and return the result line; virtual times are those of the other figures."""
        setup = self.setup
        workload = setup.updates * setup.n
        result = unbroken(
            pl.train(
                make_job(setup, where.folder),
                protocol=self.series.name,
                cluster=pl.Cluster(setup.n, pl.timing.Deterministic(1.0), device=where.device),
                stop=pl.Stop(gradients=workload, updates=where.updates),
                evaluate_every=pl.plans.Duration("gradients", workload / setup.evaluations),
                seed=self.seed,
            )
        )
        return result_line(result)


def result_line(result: pl.results.Result) -> Line:
    """Return the end of a run and its curves by updates."""
    history = result.history
    updates, curve = history.of(UpdateMade), history.of(VersionEvaluated)
    return {
        "stopped_by": result.stopped_by.name.lower(),
        "accuracy": round(float(result.metrics.get("accuracy", nan)), 5),
        "made": len(updates),
        "test_update": [each.version for each in curve],
        "test_accuracy": rounded(each.metrics["accuracy"] for each in curve),
        "train_loss": rounded(update.loss for update in updates),
    }


def runs(figure: str, seeds: int | None, only: str = "") -> Iterator[Run]:
    """Yield the runs of a figure; for the arguments see `seed_by_seed`."""
    cases = FIGURES[figure].cases
    for name, series, seed in seed_by_seed(cases, seeds, only):
        yield Run(cases[name].setup, series, seed)


def runs_of(case: Case, lines: Sequence[Line]) -> dict[str, dict[int, Line]]:
    """Return the runs of a case by series and seed, independent of their figure."""
    seeds = range(max((line["asked"]["seed"] for line in lines), default=-1) + 1)
    by_key = {key(line["asked"]): line for line in lines}
    return {
        each.name: {
            seed: by_key[name] for seed in seeds if (name := key(Run(case.setup, each, seed).asked())) in by_key
        }
        for each in case.series
    }
