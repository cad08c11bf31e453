"""Runs on real processes, which check the simulated times: a worker sleeps for most of the seconds of a gradient."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

import paceline as pl
from paceline.clusters.simulated import RoundTrip, RoundTrips
from paceline.worker.evaluation import evaluate
from papers.ddp.jobs import make_job
from papers.ddp.patterns import PATTERNS
from papers.ddp.settings import AUTO, CONTENDERS, DDP, EVALUATIONS, JOBS, MARGIN, WITHOUT_SLOW, Contender
from papers.ddp.times import cluster_of
from papers.ddp.training import evaluations
from papers.store import Line
from papers.tasks import Where, unbroken

REAL_PATTERNS = ("half", "rotating", "transient")
REAL_CONTENDERS = (DDP, WITHOUT_SLOW, "k_sync(k=n-1)", AUTO)
REAL_LR = 0.16
SEEDS = 3
COMPUTING_S = 0.01  # processor time of a gradient on this project's machine: 8 ms alone, 13 ms on busy cores
SLOWER = 2.0  # four workers share two cores: computing must be a small part of the time
JOB = "mnist"
TITLE = "MNIST CNN on 4 real processes, which sleep for most of a gradient"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Real:
    """Task: a contender on real processes of this machine, and the same run on the simulated cluster.

    A worker sleeps, computes its gradient, and needs for both the seconds that the pattern gives, if it does not wait
    for a core. A machine may run one task at a time.

    Args:
        pattern: name of the pattern.
        contender: name of the contender.
        seed: seed of the run, also of the times.
        n: number of workers, of which the contender may remove the slow one.
        gradients: minibatches of the run.
        lr: learning rate.
        slower: factor by which the times of the pattern are longer, > 0, in both runs.
    """

    pattern: str
    contender: str
    seed: int
    n: int = 4
    gradients: int = 960
    lr: float = REAL_LR
    slower: float = SLOWER

    def asked(self) -> Line:
        """Return all settings that the result depends on."""
        return {
            "job": JOB,
            "n": self.n,
            "pattern": self.pattern,
            "series": self.contender,
            "protocol": self._settings.plan(self.n),
            "rule": self._settings.rule,
            "seed": self.seed,
            "lr": self.lr,
            "gradients": self.gradients,
            "batch_size": JOBS[JOB].batch_size,
            "computing_s": COMPUTING_S,
            "slower": self.slower,
        }

    def carry_out(self, where: Where) -> Line:
        """Train twice, and return the evaluations, the seconds and the mean k of both runs."""
        runs = {"real": self._on_ranks(where), "simulated": self._simulated(where)}
        return {f"{kind}_{name}": value for kind, run in runs.items() for name, value in run.items()}

    @property
    def live(self) -> int:
        """Number of workers that take part."""
        return self.n - self._settings.without_slow

    @property
    def sleeping(self) -> Sleeping:
        """Cluster whose times the workers sleep."""
        cluster = PATTERNS[self.pattern].cluster(self.n, without_slow=self._settings.without_slow)
        return Sleeping(**vars(slowed(cluster, self.slower)), computing_s=COMPUTING_S)

    @property
    def every(self) -> int:
        """Number of gradients between two evaluations."""
        return self.gradients // EVALUATIONS

    def job(self, folder: Path) -> pl.Job:
        """Return the job.

        Args:
            folder: folder with the folders of the data sets.
        """
        sized_for = min(JOBS[JOB].gradients)  # the length of a run sets only the schedule of AdamW
        return make_job(JOB, sized_for, self.lr, self._settings.rule, folder)

    def train(
        self, job: pl.Job, cluster: pl.Cluster | pl.Torchrun, updates: int | None, **more: Any
    ) -> pl.results.Result:
        """Train with paceline.

        Args:
            job: job, with more than `job` returns.
            cluster: simulated or real cluster.
            updates: number of updates after which the run ends; None for the task's own stop.
            more: more arguments of `pl.train`.
        """
        plan, stop = self._settings.plan(self.n), pl.Stop(gradients=self.gradients, updates=updates)
        options = {"stop": stop, "seed": self.seed, "progress": False, **more}
        return unbroken(pl.train(job, protocol=plan, cluster=cluster, **options))

    @property
    def _settings(self) -> Contender:
        return CONTENDERS[self.contender]

    def _simulated(self, where: Where) -> Line:
        cluster = slowed(cluster_of(JOB, self.n, PATTERNS[self.pattern], self._settings, self.seed), self.slower)
        every = pl.plans.Duration("gradients", self.every)
        result = self.train(self.job(where.folder), cluster, where.updates, evaluate_every=every)
        return {"evaluated": evaluations(result), **measured(result)}

    def _on_ranks(self, where: Where) -> Line:
        is_ddp = self._settings.kind == "torch"
        module = f"papers.ddp.{'ddp' if is_ddp else 'paceline'}_ranks"
        ranks = self.live if is_ddp else self.live + 1  # and the server
        options = ("--standalone", "--monitor-interval", "0.1", "--nproc-per-node", str(ranks))
        with TemporaryDirectory() as folder:
            given = RankArguments(self, where.folder.resolve(), where.updates, Path(folder) / "result.json")
            command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", module, given.text()]
            subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
            result: Line = json.loads(given.out.read_text())
        return result


class RankArguments(NamedTuple):
    """Command-line argument of every rank.

    Attributes:
        task: task that the ranks carry out.
        folder: folder with the folders of the data sets.
        updates: number of updates after which the run ends; None for the task's own stop.
        out: file of the result, which rank 0 writes.
    """

    task: Real
    folder: Path
    updates: int | None
    out: Path

    def text(self) -> str:
        """Return the arguments as JSON."""
        return json.dumps([asdict(self.task), str(self.folder), self.updates, str(self.out)])

    @classmethod
    def of(cls, text: str) -> RankArguments:
        """Return the arguments of such a text."""
        task, folder, updates, out = json.loads(text)
        return cls(Real(**task), Path(folder), updates, Path(out))


def slowed(cluster: pl.Cluster, factor: float) -> pl.Cluster:
    """Return the cluster of a pattern with compute times and periods that are longer by a factor, > 0."""
    longer = []
    for each in cluster.slowdowns:
        assert isinstance(each, pl.timing.Periodic), f"a pattern has periods only, given {each}"
        longer.append(replace(each, on_s=factor * each.on_s, every_s=factor * each.every_s, at_s=factor * each.at_s))
    speeds = [cluster.speed_of(worker) / factor for worker in range(cluster.n)]
    return replace(cluster, speed=speeds, slowdowns=longer)


@dataclass(frozen=True)
class Sleeping(pl.Cluster):
    """Cluster of workers that compute their gradients, and sleep for the rest of the seconds of a gradient.

    Args:
        computing_s: seconds of each gradient that a worker does not sleep, >= 0.
    """

    computing_s: float = 0.0

    def round_trips(self, seed: int, payload_bytes: float = 0) -> RoundTrips:
        """Return the seconds that the workers sleep, as compute times."""
        return _Sleeps(self, seed, payload_bytes)


class _Sleeps(RoundTrips):
    def __init__(self, cluster: Sleeping, seed: int, payload_bytes: float) -> None:
        super().__init__(cluster, seed, payload_bytes)
        self._computing_s = cluster.computing_s

    def times(self, worker: int, draw: int, start_s: float, share: float = 1.0) -> RoundTrip:
        trip = super().times(worker, draw, start_s, share)
        return trip._replace(compute_s=max(0.0, trip.compute_s - self._computing_s * share))


class Snapshots:
    """Snapshots of the parameters during a run, evaluated after it: evaluations take no processor time from workers.

    Args:
        every: number of gradients; the first update at or after each multiple of them is kept.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._due = every
        self._kept: list[tuple[Line, list[Tensor]]] = []

    def on_update(self, updates: int, gradients: int, time_s: float, parameters: Iterable[Tensor]) -> None:
        """Keep the parameters if this update is due.

        Args:
            updates: number of updates so far.
            gradients: number of gradients so far.
            time_s: seconds since the start of the run.
            parameters: parameters of the model after this update.
        """
        if gradients >= self._due:
            self._due = (gradients // self._every + 1) * self._every
            at = {"updates": updates, "gradients": gradients, "time_s": round(time_s, 4)}
            self._kept.append((at, [each.detach().clone() for each in parameters]))

    def evaluated(self, job: pl.Job, seed: int) -> list[Line]:
        """Return update, gradients, seconds, loss and accuracy of each kept update.

        Args:
            job: job with the evaluation data.
            seed: seed of the run.
        """
        model, evaluated = job.build_model(seed), []
        for at, parameters in self._kept:
            with torch.no_grad():
                for own, kept in zip(model.parameters(), parameters, strict=True):
                    own.copy_(kept)
            evaluated.append({**at, **{name: round(each, 5) for name, each in evaluate(job, model, seed).items()}})
        return evaluated


def measured(result: pl.results.Result) -> Line:
    """Return the seconds and the mean k of a run."""
    return {"s": round(result.time_s, 4), "mean_k": round(result.history.totals.mean_k, 3)}


def tasks(seeds: int | None, only: str) -> list[Real]:
    """Return the tasks whose "job/n/pattern/contender" has a match of a regular expression, seed by seed."""
    return [
        Real(pattern, contender, seed)
        for seed in range(seeds or SEEDS)
        for pattern in REAL_PATTERNS
        for contender in REAL_CONTENDERS
        if re.search(only, f"{JOB}/{Real.n}/{pattern}/{contender}")
    ]


class Ratios(NamedTuple):
    """Seconds of a contender, divided by those of DDP with the same pattern and seed.

    Attributes:
        run: ratio of the whole runs, which have the same number of samples.
        target: ratio of the seconds to the final loss of DDP plus the margin; inf if the contender has not reached it.
    """

    run: float
    target: float


class Compared(NamedTuple):
    """Ratios of a contender on real processes and on the simulated cluster."""

    real: Ratios
    simulated: Ratios


def compared(lines: Iterable[Line]) -> Mapping[tuple[str, str, int], Compared]:
    """Return the ratios by pattern, contender and seed, where DDP has run too."""
    found = {tuple(line["asked"][name] for name in ("pattern", "series", "seed")): line for line in lines}
    return {
        (pattern, contender, seed): Compared(_ratios(line, ddp, "real"), _ratios(line, ddp, "simulated"))
        for (pattern, contender, seed), line in found.items()
        if contender != DDP and (ddp := found.get((pattern, DDP, seed))) is not None
    }


def _ratios(line: Line, ddp: Line, kind: str) -> Ratios:
    target = ddp[f"{kind}_evaluated"][-1]["loss"] + MARGIN
    ours_s, ddp_s = (_seconds_to(target, each[f"{kind}_evaluated"]) for each in (line, ddp))
    return Ratios(line[f"{kind}_s"] / ddp[f"{kind}_s"], ours_s / ddp_s)


def _seconds_to(target: float, evaluated: Sequence[Line]) -> float:
    return next((float(each["time_s"]) for each in evaluated if each["loss"] <= target), inf)
