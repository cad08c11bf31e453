"""The training runs of a figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import paceline as pl
from paceline.core.records import DecisionMade, UpdateMade, VersionEvaluated
from papers.command import seed_by_seed
from papers.dbw.jobs import make_job
from papers.dbw.settings import FIGURES, Case, Figure, Series
from papers.store import Line, rounded
from papers.tasks import Where, unbroken


@dataclass(frozen=True)
class Run:
    """One run of a figure: all settings that its result depends on."""

    figure: str
    case: str
    series: Series
    seed: int

    def asked(self) -> Line:
        """Return the fields as plain JSON; equal runs have equal fields."""
        figure, case = self._parts()
        return {
            "figure": self.figure,
            "case": self.case,
            "series": self.series.name,
            "cluster": str(case.cluster),
            "batch_size": case.batch_size or figure.batch_size,
            "lr": self.series.lr or figure.lr,
            "stop": str(case.stop or figure.stop),
            "evaluate_every": self.series.evaluate_every,
            "seed": self.seed,
        }

    def carry_out(self, where: Where) -> Line:
        """Train, and return the result line."""
        figure, case = self._parts()
        batch_size, lr = case.batch_size or figure.batch_size, self.series.lr or figure.lr
        stop = case.stop or figure.stop
        result = unbroken(
            pl.train(
                make_job(figure.job, batch_size, lr, self.series.lr_rule, where.folder),
                protocol=self.series.protocol,
                cluster=replace(case.cluster, device=where.device),
                stop=replace(stop, updates=where.updates or stop.updates),
                evaluate_every=pl.plans.Duration("updates", self.series.evaluate_every),
                seed=self.seed,
            )
        )
        return result_line(result)

    def _parts(self) -> tuple[Figure, Case]:
        figure = FIGURES[self.figure]
        return figure, figure.cases[self.case]


def result_line(result: pl.results.Result) -> Line:
    """Return the result line of a run: its end, k and time of each update, and the curve of the probe."""
    updates = result.history.of(UpdateMade)
    curve = result.history.of(VersionEvaluated)
    return {
        "time_s": round(result.time_s, 4),
        "stopped_by": result.stopped_by.name.lower(),
        "updates": len(updates),
        "mean_k": round(result.history.totals.mean_k, 3),
        "k": [update.k for update in updates],
        "why": reasons(result.history),
        "update_s": rounded(update.now_s for update in updates),
        "probe_s": rounded(each.published_s for each in curve),
        "probe_loss": rounded(each.metrics["loss"] for each in curve),
        "probe_accuracy": rounded(each.metrics.get("accuracy", float("nan")) for each in curve),
    }


REASONS = {"begin": "all workers", "best": "expects", "rose": "more than", "no gain": "no k has"}


def reasons(history: pl.results.History) -> Line:
    """Return the number of updates and the total seconds by DBW's reason for their k."""
    spent: Line = {}
    decided, opened_s = "", 0.0
    for record in history:
        match record:
            case DecisionMade(kind="quorum"):
                said = record.reason.partition(": ")[2]
                decided = next((name for name, words in REASONS.items() if said.startswith(words)), "")
            case UpdateMade() if decided:
                count, spent_s = spent.get(decided, (0, 0.0))
                spent[decided] = (count + 1, round(spent_s + record.now_s - opened_s, 3))
                opened_s = record.now_s
    return spent


def runs(figure: str, seeds: int | None, only: str = "") -> Iterator[Run]:
    """Yield the runs of a figure; for the arguments see `seed_by_seed`."""
    for case, series, seed in seed_by_seed(FIGURES[figure].cases, seeds, only):
        yield Run(figure, case, series, seed)
