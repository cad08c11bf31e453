"""Runs of the comparison: losses of parameters that do not depend on times, and timed runs of all other contenders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import paceline as pl
from paceline.core.records import DecisionMade, GradientArrived, UpdateMade, VersionEvaluated
from papers.ddp.jobs import make_job
from papers.ddp.patterns import PATTERNS
from papers.ddp.settings import CONTENDERS, EVALUATIONS, JOBS, Comparison
from papers.ddp.times import cluster_of
from papers.store import Line
from papers.tasks import Where, unbroken


@dataclass(frozen=True)
class Untimed:
    """Task: validation losses of a contender whose parameters do not depend on times.

    Args:
        job: name of the job.
        n: number of workers of the cluster, of which the contender may remove the slow one.
        contender: name of the contender.
        seed: seed of the run.
        lr: learning rate.
    """

    job: str
    n: int
    contender: str
    seed: int
    lr: float

    def asked(self) -> Line:
        """Return all settings that the result depends on."""
        return _asked(self)

    def carry_out(self, where: Where) -> Line:
        """Train, and return the evaluations."""
        contender = CONTENDERS[self.contender]
        job = make_job(self.job, self.n, self.lr, contender.rule, where.folder)
        gradients, n = JOBS[self.job].gradients[self.n], self.n - contender.without_slow
        first = round(contender.averages_after * gradients / n) * n
        evaluated = []
        if first:
            result = self._train(job, "all_reduce", n, first, self.seed, where)
            evaluated += evaluations(result)
            # The second part has other minibatches, which are keyed by seed, worker and draw.
            job = replace(job, model=result.model)
        result = self._train(job, contender.plan(n), n, gradients - first, self.seed + bool(first) * 1_000, where)
        for each in evaluations(result):
            evaluated.append({**each, "updates": each["updates"] + first // n, "gradients": each["gradients"] + first})
        return {"evaluated": [{name: each[name] for name in each if name != "time_s"} for each in evaluated]}

    def _train(self, job: pl.Job, plan: str, n: int, gradients: int, seed: int, where: Where) -> pl.results.Result:
        cluster = pl.Cluster(n, pl.timing.Deterministic(1.0), device=where.device)
        stop = pl.Stop(gradients=gradients, updates=where.updates)
        every = pl.plans.Duration("gradients", JOBS[self.job].gradients[self.n] // EVALUATIONS)
        return unbroken(pl.train(job, protocol=plan, cluster=cluster, stop=stop, evaluate_every=every, seed=seed))


@dataclass(frozen=True)
class Timed:
    """Task: validation losses and times of a contender on the simulated cluster of a pattern.

    Args:
        job: name of the job.
        n: number of workers.
        pattern: name of the pattern.
        contender: name of the contender.
        seed: seed of the run.
        lr: learning rate.
    """

    job: str
    n: int
    pattern: str
    contender: str
    seed: int
    lr: float

    def asked(self) -> Line:
        """Return all settings that the result depends on."""
        return {**_asked(self), "pattern": self.pattern}

    def carry_out(self, where: Where) -> Line:
        """Train, and return the evaluations, the gradients of the slow worker that were used, and what `auto` chose."""
        contender, about = CONTENDERS[self.contender], JOBS[self.job]
        gradients = about.gradients[self.n]
        result = unbroken(
            pl.train(
                make_job(self.job, self.n, self.lr, contender.rule, where.folder),
                protocol=contender.plan(self.n),
                cluster=replace(
                    cluster_of(self.job, self.n, PATTERNS[self.pattern], contender, self.seed), device=where.device
                ),
                stop=pl.Stop(gradients=gradients, updates=where.updates),
                evaluate_every=pl.plans.Duration("gradients", gradients // EVALUATIONS),
                seed=self.seed,
            )
        )
        used = [each for each in result.history.of(GradientArrived) if each.used]
        slow_samples = sum(each.samples for each in used if each.worker == self.n - 1)
        chosen = [each.reason for each in result.history.of(DecisionMade) if each.kind == "protocol"]
        return {
            "evaluated": evaluations(result),
            "slow_share": round(slow_samples / sum(each.samples for each in used), 4),
            "mean_k": round(result.history.totals.mean_k, 3),
            **({"chosen": [each.partition(": ")[0] for each in chosen]} if self.contender == "auto" else {}),
        }


def trained(comparison: Comparison) -> list[str]:
    """Return the contenders of a comparison that have runs of their own."""
    dies = PATTERNS[comparison.pattern].dies
    return [name for name in comparison.contenders if CONTENDERS[name].trained_as(name, dies) == name]


def task_of(comparison: Comparison, name: str, seed: int, lr: float) -> Untimed | Timed:
    """Return the task of a contender in a comparison."""
    job, n, pattern = comparison.job, comparison.n, comparison.pattern
    if CONTENDERS[name].is_timed(dies=PATTERNS[pattern].dies):
        return Timed(job, n, pattern, name, seed, lr)
    return Untimed(job, n, name, seed, lr)


def _asked(task: Untimed | Timed) -> Line:
    about, contender = JOBS[task.job], CONTENDERS[task.contender]
    return {
        "job": task.job,
        "n": task.n,
        "series": task.contender,
        "protocol": contender.plan(task.n),
        "rule": contender.rule,
        "seed": task.seed,
        "lr": task.lr,
        "gradients": about.gradients[task.n],
        "batch_size": about.batch_size,
    }


def evaluations(result: pl.results.Result) -> list[dict[str, Any]]:
    """Return update, gradients, seconds, loss and accuracy of each evaluated version, but the first one."""
    workload: Mapping[int, int] = {made.version: made.workload for made in result.history.of(UpdateMade)}
    return [
        {
            "updates": each.version,
            "gradients": workload[each.version],
            "time_s": round(each.published_s, 4),
            **{name: round(value, 5) for name, value in each.metrics.items()},
        }
        for each in result.history.of(VersionEvaluated)
        if each.version in workload
    ]
