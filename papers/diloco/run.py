"""Train a small language model with local steps, against `bsp`; saved runs are not repeated.

python -m papers.diloco.run --figure outer                    # search of the outer optimizer
python -m papers.diloco.run --figure rates                    # search of the learning rates
python -m papers.diloco.run --figure losses --processes 2     # losses after equal samples
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import paceline as pl
from paceline.core.records import VersionEvaluated
from papers.command import Paper
from papers.diloco.settings import (
    CASES,
    EVALUATIONS,
    LR,
    OUTERS,
    RATES,
    RESULTS,
    SEEDS,
    TUNING_SEED,
    H,
)
from papers.gpt import gpt
from papers.series import Runs, series_of
from papers.store import Line, figure_store
from papers.tasks import Task, Where, unbroken

FIGURES = ("outer", "rates", "losses")


@dataclass(frozen=True)
class Run:
    """Task: one run of a series with one seed.

    Args:
        case: name of the case.
        protocol: protocol.
        seed: seed.
        lr: learning rate of AdamW.
    """

    case: str
    protocol: str
    seed: int
    lr: float = LR

    def asked(self) -> Line:
        """Return all settings that the result depends on."""
        case = CASES[self.case]
        more = {"gradients": case.gradients, "evaluate_every": case.gradients // EVALUATIONS, "lr": self.lr}
        return {"case": self.case, "series": self.protocol, "seed": self.seed, "cluster": str(case.cluster), **more}

    def carry_out(self, where: Where) -> Line:
        """Train, and return the validation loss and the time of each evaluation, and the number of messages."""
        case = CASES[self.case]
        job = replace(gpt(where.folder), optimizer=partial(torch.optim.AdamW, lr=self.lr))
        result = unbroken(
            pl.train(
                job,
                protocol=self.protocol,
                cluster=replace(case.cluster, device=where.device),
                stop=pl.Stop(gradients=case.gradients, updates=where.updates),
                evaluate_every=pl.plans.Duration("gradients", case.gradients // EVALUATIONS),
                seed=self.seed,
            )
        )
        found = result.history.of(VersionEvaluated)
        totals = result.history.totals
        return {
            "time_s": round(result.time_s, 2),
            "updates": totals.updates,
            "pushes": totals.used + totals.dropped,
            "mean_k": round(totals.mean_k, 3),
            "at_s": [round(each.published_s, 2) for each in found],
            "loss": [round(each.metrics["loss"], 4) for each in found],
        }


def tasks(figure: str, seeds: int | None, only: str) -> list[Task]:
    """Return the tasks of a figure; each needs what the searches before it have found."""
    found = {"outer": outer, "rates": rates, "losses": losses}[figure](seeds or SEEDS)
    return [task for task in found if re.search(only, f"{task.case}/{task.protocol}")]


def outer(seeds: int) -> Iterator[Run]:
    """Yield the runs of the search of the outer optimizer."""
    yield from (Run("equal", f"bsp + local_steps(H={H}, outer='{each}')", TUNING_SEED) for each in OUTERS)


def rates(seeds: int) -> Iterator[Run]:
    """Yield the runs of the search of the learning rates."""
    protocols = series_names("equal, twice as long", RESULTS)
    yield from (Run("equal", protocol, TUNING_SEED, lr) for lr in RATES for protocol in protocols)


def losses(seeds: int) -> Iterator[Run]:
    """Yield the runs of the comparison, seed by seed."""
    for seed in range(seeds):
        for name in CASES:
            yield from (Run(name, series, seed) for series in series_names(name, RESULTS))


def series_names(case: str, folder: Path) -> list[str]:
    """Return the protocols of a case, with the outer optimizer that the search has found; without it only the others.

    Args:
        case: name of the case.
        folder: folder of the results.
    """
    best = best_outer(figure_store("outer", folder).lines())
    return [series.replace("OUTER", f"'{best}'") for series in CASES[case].series if best or "OUTER" not in series]


def runs_of(case: str, folder: Path) -> dict[str, Runs]:
    """Return the runs of each series of a case, in its order."""
    found = series_of([line for line in figure_store("losses", folder).lines() if line["asked"]["case"] == case])
    return {name: found[name] for name in series_names(case, folder) if name in found}


def best_outer(lines: Sequence[Line]) -> str:
    """Return the outer optimizer with the least loss after all samples; empty if none was tried."""
    if not lines:
        return ""
    best = min(lines, key=lambda line: line["loss"][-1])
    return re.search(r"outer='(.*)'", best["asked"]["series"])[1]  # type: ignore[index]  # every line has one


def main(arguments: Sequence[str] | None = None) -> None:
    Paper(__doc__ or "", FIGURES, RESULTS, tasks, figure_store, folder=Path("data")).run(arguments)


if __name__ == "__main__":
    main()
