"""Times to the target: of protocols at their own tuned rate, and at that of BSP under the rule "noise"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from statistics import fmean
from typing import Literal

import paceline as pl
from paceline.core.events import Outcome
from paceline.core.records import DecisionMade, VersionEvaluated
from papers.auto.jobs import make_job
from papers.auto.settings import CASES, FINAL_GRADIENTS, LONGEST, LONGEST_RULED, SEEDS, Case
from papers.store import Line
from papers.tasks import Where, unbroken

LOWEST = -14  # power of sqrt(2) of the smallest rate, over that at which the search begins


@dataclass(frozen=True)
class Tuned:
    """Task: the times of a protocol at its own rate, from a grid of 2 that is refined by sqrt(2) around the best."""

    case: str
    protocol: str

    def asked(self) -> Line:
        """Return all settings that the result depends on."""
        return asked(self.case, self.protocol, "own rate")

    def carry_out(self, where: Where) -> Line:
        """Search the rate with some of the seeds, and run all seeds at the best one."""
        case = CASES[self.case]
        grid: dict[float, float] = {case.lr: 0.0}
        if case.searches:
            grid = _search(case, self.protocol, where)
        lr = min(grid, key=lambda each: grid[each])
        runs = [trained(case, self.protocol, lr, "constant", seed, inf, where) for seed in range(case.seeds)]
        return {"lr": lr, "runs": runs, "grid": {f"{rate:.4g}": _rounded(grid[rate]) for rate in sorted(grid)}}


@dataclass(frozen=True)
class Ruled:
    """Task: the times of a protocol or of `auto` under the rule "noise", at the tuned rate of BSP."""

    case: str
    protocol: str
    lr: float
    bsp_s: float

    def asked(self) -> Line:
        """Return all settings that the result depends on."""
        return {**asked(self.case, self.protocol, "noise"), "lr": self.lr}

    def carry_out(self, where: Where) -> Line:
        """Run all seeds."""
        case = CASES[self.case]
        most_s = LONGEST_RULED * self.bsp_s
        return {
            "runs": [trained(case, self.protocol, self.lr, "noise", seed, most_s, where) for seed in range(case.seeds)]
        }


@dataclass(frozen=True)
class Final:
    """Task: the loss on unseen data after equal samples, at the own rate or under the rule at that of BSP."""

    case: str
    protocol: str
    lr: float
    rule: Literal["constant", "noise"]

    def asked(self) -> Line:
        """Return all settings that the result depends on."""
        settings = asked(self.case, self.protocol, "noise" if self.rule == "noise" else "own rate")
        gradients = FINAL_GRADIENTS[self.case]
        return {**settings, "seeds": SEEDS, "evaluate_every": gradients, "lr": self.lr}

    def carry_out(self, where: Where) -> Line:
        """Run all seeds."""
        return {"runs": [self._metrics(seed, where) for seed in range(SEEDS)]}

    def _metrics(self, seed: int, where: Where) -> Line:
        case, gradients = CASES[self.case], FINAL_GRADIENTS[self.case]
        result = unbroken(
            pl.train(
                make_job(case, self.lr, self.rule, where.folder, has_unseen=True),
                protocol=self.protocol,
                cluster=replace(case.cluster, device=where.device),
                stop=pl.Stop(gradients=gradients, updates=where.updates),
                evaluate_every=pl.plans.Duration("gradients", gradients),
                seed=seed,
            )
        )
        last = result.history.of(VersionEvaluated)[-1]
        return {name: round(value, 5) for name, value in last.metrics.items()}


def asked(case: str, protocol: str, rule: str) -> Line:
    """Return the settings of a case, a protocol and a rule as plain JSON."""
    about = CASES[case]
    return {
        "case": case,
        "series": f"{protocol}, {rule}",
        "cluster": str(about.cluster),
        "target": about.target,
        "evaluate_every": about.evaluate_every,
        "seeds": about.seeds,
    }


def trained(case: Case, protocol: str, lr: float, rule: str, seed: int, most_s: float, where: Where) -> Line:
    """Train to the target, and return seconds (None if it was not reached), gradients, and the choices of `auto`."""
    stop = pl.Stop(eval_loss=case.target, gradients=case.most_gradients, seconds=most_s if isfinite(most_s) else None)
    result = unbroken(
        pl.train(
            make_job(case, lr, rule, where.folder),
            protocol=protocol,
            cluster=replace(case.cluster, device=where.device),
            stop=replace(stop, updates=where.updates),
            evaluate_every=pl.plans.Duration("gradients", case.evaluate_every),
            seed=seed,
        )
    )
    totals = result.history.totals
    decisions = (each for each in result.history.of(DecisionMade) if each.kind == "protocol")
    chosen = [each.reason.partition(": ")[0] for each in decisions]
    return {
        "seconds": round(result.time_s, 3) if result.stopped_by is Outcome.EVAL_LOSS else None,
        "gradients": totals.applied,
        "mean_k": round(totals.mean_k, 3),
        **({"chosen": chosen} if protocol == "auto" else {}),
    }


def mean_s(runs: Sequence[Line]) -> float:
    """Return the mean time of some runs, inf if one did not reach the target."""
    return fmean(inf if run["seconds"] is None else run["seconds"] for run in runs)


def _search(case: Case, protocol: str, where: Where) -> dict[float, float]:
    """Return the mean time of each rate that was tried: neighbours of the best by factors of 2, then of sqrt(2)."""
    times: dict[int, float] = {}

    def tried(power: int) -> float:
        if power not in times:
            lr, limit_s = case.lr * 2 ** (power / 2), LONGEST * min(times.values(), default=inf)
            runs: list[Line] = []
            for seed in range(case.tuning_seeds):
                runs.append(trained(case, protocol, lr, "constant", seed, limit_s, where))
                if runs[-1]["seconds"] is None:
                    break
            times[power] = mean_s(runs)
        return times[power]

    power = 0
    while tried(power) == inf and power > LOWEST:
        power -= 2
    for step in (2, 1):
        while (better := min((power, power + step, power - step), key=tried)) != power:
            power = better
    return {case.lr * 2 ** (each / 2): seconds for each, seconds in times.items()}


def _rounded(seconds: float) -> float | None:
    return round(seconds, 3) if isfinite(seconds) else None
