"""The training runs of Fig. 8 to 14."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np

import paceline as pl
from paceline.core.records import UpdateMade, VersionEvaluated
from papers.command import seed_by_seed
from papers.slow_and_stale.jobs import make_job
from papers.slow_and_stale.settings import FIGURES, Case, Series
from papers.store import Line, key, rounded
from papers.tasks import Where, unbroken


@dataclass(frozen=True)
class Run:
    """One run: all settings that its result depends on, without the figures that show it."""

    case: Case
    series: Series
    seed: int

    def asked(self) -> Line:
        """Return the fields as plain JSON; equal runs have equal fields."""
        case = self.case.of(self.series)
        return {
            "data": case.data,
            "pixels": case.pixels,
            "series": self.series.name,
            "workers": case.cluster.n,
            "timing": str(case.cluster.distribution_of(0)),
            "batch_size": case.batch_size,
            "lr": self.series.lr or case.lr,
            "regulariser": case.regulariser,
            "seconds": self.series.seconds or case.seconds,
            "evaluate_every_s": case.seconds / case.evaluations,
            "seed": self.seed,
        }

    def carry_out(self, where: Where) -> Line:
        """Train, and return the result line."""
        asked, case = self.asked(), self.case.of(self.series)
        stop = pl.Stop(seconds=asked["seconds"])
        result = unbroken(
            pl.train(
                make_job(case, asked["lr"], where.folder),
                protocol=self.series.protocol,
                cluster=replace(case.cluster, device=where.device),
                stop=replace(stop, updates=where.updates) if where.updates else stop,
                evaluate_every=pl.plans.Duration("seconds", asked["evaluate_every_s"]),
                seed=self.seed,
            )
        )
        return result_line(result.history)


def result_line(history: pl.results.History) -> Line:
    """Return the curves of the probe by time and by update, and the staleness."""
    updates, curve = history.of(UpdateMade), history.of(VersionEvaluated)
    scales = [float(part.mean()) for part in np.array_split([update.step_scale for update in updates], 10) if len(part)]
    return {
        "time_s": round(updates[-1].now_s, 4),
        "updates": len(updates),
        "mean_k": round(history.totals.mean_k, 3),
        "gradients": history.totals.used,
        "mean_staleness": round(history.totals.mean_staleness, 3),
        "mean_step_scale": round(mean(update.step_scale for update in updates), 4),
        "step_scales": rounded(scales),
        "probe_s": rounded(each.published_s for each in curve),
        "probe_version": [each.version for each in curve],
        "probe_loss": rounded(each.metrics["loss"] for each in curve),
        "probe_accuracy": rounded(each.metrics["accuracy"] for each in curve),
    }


def runs(figure: str, seeds: int | None, only: str = "") -> Iterator[Run]:
    """Yield the runs of a figure; for the arguments see `seed_by_seed`."""
    cases = FIGURES[figure].cases
    for name, series, seed in seed_by_seed(cases, seeds, only):
        yield Run(cases[name], series, seed)


def lines_of(case: Case, lines: Sequence[Line]) -> list[Line]:
    """Return the lines of the runs of a case, independent of their figure, in the order of its series."""
    seeds = range(max((line["asked"]["seed"] for line in lines), default=-1) + 1)
    by_key = {key(line["asked"]): line for line in lines}
    wanted = [key(Run(case, series, seed).asked()) for series in case.series for seed in seeds]
    return [by_key[each] for each in wanted if each in by_key]
