"""The training runs of a figure, several at a time, each written down when it has ended."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import repeat
from time import perf_counter

import torch

import paceline as pl
from paceline.history import DecisionMade, UpdateMade, VersionEvaluated
from papers.dbw.jobs import make_job
from papers.dbw.settings import FIGURES, Case, Figure, Series
from papers.dbw.store import Line, Store, key, rounded
from papers.dbw.tasks import Task, Where


@dataclass(frozen=True)
class Run:
    """One run of a figure; it says everything that its result depends on."""

    figure: str
    case: str
    series: Series
    seed: int

    def asked(self) -> Line:
        """Return it as JSON can hold it: two runs are the same one if this is."""
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
        """Train, and return what is to be kept of it."""
        figure, case = self._parts()
        batch_size, lr = case.batch_size or figure.batch_size, self.series.lr or figure.lr
        result = pl.train(
            make_job(figure.job, batch_size, lr, self.series.lr_rule, where.folder),
            protocol=self.series.protocol,
            cluster=replace(case.cluster, device=where.device),
            stop=replace(case.stop or figure.stop, **({"updates": where.updates} if where.updates else {})),
            evaluate_every=pl.Extent("updates", self.series.evaluate_every),
            seed=self.seed,
        )
        return told(result)

    def _parts(self) -> tuple[Figure, Case]:
        figure = FIGURES[self.figure]
        return figure, figure.cases[self.case]


def told(result: pl.Result) -> Line:
    """Return what a figure needs of a run: its end, k and time of each update, and the curve of the probe."""
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


REASONS = {"begin": "all workers", "best": "expects", "rose": "more than", "no gain": "no k promises"}


def reasons(history: pl.History) -> Line:
    """Return how many updates waited for the k that they did for which of DBW's reasons, and for how long in all."""
    told: Line = {}
    decided, opened_s = "", 0.0
    for record in history:
        match record:
            case DecisionMade(kind="quorum"):
                said = record.reason.partition(": ")[2]
                decided = next((name for name, words in REASONS.items() if said.startswith(words)), "")
            case UpdateMade() if decided:
                count, spent_s = told.get(decided, (0, 0.0))
                told[decided] = (count + 1, round(spent_s + record.now_s - opened_s, 3))
                opened_s = record.now_s
    return told


def runs(figure: str, seeds: int | None, only: str = "") -> Iterator[Run]:
    """Yield the runs of a figure, seed by seed, so that whatever is finished is paired.

    Args:
        seeds: of each series; the case's own number if not given.
        only: regular expression that is to be found in "case/series", as "alpha=1/dbw".
    """
    cases = FIGURES[figure].cases
    for seed in range(max(seeds or case.seeds for case in cases.values())):
        for name, case in cases.items():
            if seed < (seeds or case.seeds):
                yield from (
                    Run(figure, name, series, seed)
                    for series in case.series
                    if re.search(only, f"{name}/{series.name}")
                )


def carry_out(tasks: Sequence[Task], where: Where, store: Store, processes: int) -> None:
    """Do the tasks that the store does not hold, and write each down when it is done.

    Args:
        processes: tasks at a time, each with one thread; a single one is done in this process.
    """
    done = store.done()
    waiting = [task for task in tasks if key(task.asked()) not in done]
    for line in map(_timed, waiting, repeat(where)) if processes == 1 else _in_processes(waiting, where, processes):
        store.add(line)
        print(_summary(line), flush=True)


def _in_processes(tasks: Sequence[Task], where: Where, processes: int) -> Iterator[Line]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for future in as_completed([pool.submit(_timed, task, where) for task in tasks]):
            yield future.result()


def _timed(task: Task, where: Where) -> Line:
    began = perf_counter()
    return {"asked": task.asked(), **task.carry_out(where), "took_s": round(perf_counter() - began, 1)}


def _summary(line: Line) -> str:
    asked = "  ".join(
        str(line["asked"][name]) for name in ("figure", "case", "series", "seed") if name in line["asked"]
    )
    end = f": {line['time_s']:.1f} s, {line['updates']} updates of {line['mean_k']:.1f}" if "time_s" in line else ""
    return f"{asked}{end} ({line['took_s']:.0f} s)"
