"""`search_switch`: when to leave one protocol for another, found by trial runs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from math import nan
from numbers import Integral
from pathlib import Path
from statistics import mean

from paceline.catalogue import switch_plan
from paceline.checkpoint.identity import model_in_short
from paceline.checks import check
from paceline.cluster import Cluster, LocalCluster
from paceline.cluster_text import parse_cluster
from paceline.comparison.batch import Silent, at_a_time, open_folder, run_cells
from paceline.comparison.cells import Cell, Task
from paceline.comparison.folder import Kind, Question, cells_of, is_finished, question
from paceline.comparison.grid import Display, Report
from paceline.engines.local.engine import refuse_while_importing
from paceline.engines.replica import build_model, evaluate, usable_device
from paceline.errors import RunError, UsageError
from paceline.events import Outcome
from paceline.job import Job
from paceline.protocols import Extent, FoundFor
from paceline.recording.figures import count
from paceline.recording.run_folder import SavedRun
from paceline.search.bisection import Bisection
from paceline.search.switch_result import SwitchSearch, Trials
from paceline.stop import Stop
from paceline.switch_timing import SwitchTiming
from paceline.train import AnyCluster, check_kinds

TIMING = "timing.toml"
DIVERGED_AT = 10.0
DIVERGED = {Outcome.NOT_FINITE, Outcome.DIVERGED}


def _is_answered(path: Path, asked: Question) -> bool:
    return (path / TIMING).exists()


SEARCH = Kind("search", "search.json", _is_answered)


def search_switch(
    job: Job,
    *,
    cluster: AnyCluster,
    stop: str | Stop,
    first: str = "bsp",
    then: str = "asp",
    target: float | None = None,
    margin: float = 0.01,
    settings: int = 5,
    runs: int = 3,
    first_runs: int | None = None,
    seed: int = 0,
    two_sided: bool = False,
    out: str | Path | None = None,
    processes: int | None = None,
    evaluate_every: str | Extent | None = None,
    worker_timeout_s: float | None = None,
    display: Display | None = None,
) -> SwitchSearch:
    """Find the smallest share of the workload after which one protocol may give way to a faster one.

    Without a target, the first protocol alone is run to its end, and the mean of its final accuracies is the target.
    Then shares of the workload are tried by bisection, see `Bisection`: each by `runs` runs, and it is accepted if
    their mean final accuracy is at least target - margin. A run's final accuracy is that of its last version.

    A run that diverges ends there and fails its setting; the other runs of the setting are done all the same, so that
    nothing depends on which came first. It has diverged if gradients are not finite, or if its mean training loss
    reaches `max_loss` of the stop: ten times the loss of the untrained model on `job.eval_data`, if none is given and
    that loss is positive.

    A search that was interrupted goes on when the same is asked again: finished runs are not done again.

    Args:
        job: what to train; with `eval_data` on which an accuracy is measured.
        cluster: as for `train`.
        stop: fixes the workload, as "epochs=20" or "gradients=64000"; besides it may have a max_loss only, because
            runs that end early tell nothing of the accuracy at the end.
        first: the protocol to begin with, as it is typed, as "bsp" or "ssp(lead=2)".
        then: the one to go on with.
        target: accuracy to be kept, a share in (0, 1]; measured if not given.
        margin: by which a mean may fall short of it, in [0, 1).
        settings: shares that are tried, >= 1; the one that is found is at most 2^-settings too large.
        runs: of each of them, >= 1.
        first_runs: of the first protocol alone, which are also what times are compared with; as many as `runs` if not
            given and there is no target, and none if there is one.
        seed: of the first run of each setting, >= 0; the next ones count on from it.
        two_sided: whether a mean above target + margin is refused as well, as the paper prints it.
        out: folder for all runs and for timing.toml; runs/search-JOB-1, -2, ... if not given, one that was
            interrupted first.
        processes: runs at a time, as for `compare`; at most as many as a setting has.
        evaluate_every: as for `train`; the last version is always evaluated.
        worker_timeout_s: as for `train`.
        display: shows how the runs are doing, as `ProgressBars` does.

    Raises:
        UsageError: what was asked for cannot work, or the folder holds another search.
        RunError: a run of the first protocol alone diverged, so that there is nothing to be kept, or a run failed for
            another reason; nothing is stored then but the runs.

    Source: Li et al. (Sync-Switch), ICDCS 2021, Sect. IV-B1, Algorithm 1.
    """
    refuse_while_importing()
    cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    stop = Stop.parse(stop) if isinstance(stop, str) else stop
    check_kinds(job=(job, Job), cluster=(cluster, Cluster | LocalCluster), stop=(stop, Stop))
    check("[1, inf)", Integral, runs=runs)
    check("[0, inf)", Integral, seed=seed)
    of_first = _first_runs(first_runs, runs, target)
    bisection = Bisection(1.0 if target is None else target, margin, settings, two_sided)
    _check_stop(stop)
    every = Extent.parse(evaluate_every) if isinstance(evaluate_every, str) else evaluate_every
    search = _Search(job, cluster, stop, first, then, every, worker_timeout_s)
    search.check()
    at_once = at_a_time(cluster, processes)
    search = replace(search, stop=_ended_when_diverged(stop, job, cluster, seed))
    asked = question(
        job,
        range(seed, seed + runs),
        **{"first": first, "then": then, "first_runs": of_first, "cluster": str(cluster), "stop": str(stop)},
        **{"target": target, "margin": margin, "settings": settings, "two_sided": two_sided},
        **{"evaluate_every": every and str(every), "worker_timeout_s": worker_timeout_s},
    )
    with closing(open_folder(SEARCH, out, "search", job, asked)) as folder:
        trying = _Trying(search, folder.path, display or Silent(), at_once)
        finished = sum(map(is_finished, folder.path.glob("*/seed-*")))
        trying.display.plan(of_first + settings * runs, finished)
        found = _found(trying, bisection, range(seed, seed + of_first), range(seed, seed + runs), target)
        if found.timing is not None:
            folder.save({TIMING: found.to_toml().encode(), "table.txt": found.text().encode()})
    return found


@dataclass(frozen=True)
class _Search:
    """What is the same for every setting."""

    job: Job
    cluster: Cluster | LocalCluster
    stop: Stop
    first: str
    then: str
    evaluate_every: Extent | None
    worker_timeout_s: float | None

    def task(self, fraction: float) -> Task:
        """Return what is run to try a fraction."""
        plan = switch_plan(fraction, self.first, self.then)
        plans = {self.name(fraction): plan}
        return Task(self.job, plans, self.cluster, self.stop, self.evaluate_every, self.worker_timeout_s)

    def name(self, fraction: float) -> str:
        """Return the plan as it would be typed."""
        return self.first if fraction == 1 else f"{self.first}@{100 * fraction:.12g}% >> {self.then}"

    def check(self) -> None:
        """Refuse what cannot run."""
        if self.job.eval_data is None:
            raise UsageError(f"job {self.job.name} has nothing to measure an accuracy on; give it eval_data")
        if switch_plan(1.0, self.first, self.then) == switch_plan(1.0, self.then, self.first):
            raise UsageError(f"first and then are both {self.first}; expected two protocols to switch between")
        for fraction in (1.0, 0.5):
            self.task(fraction).check()

    def timing(self, fraction: float, file: Path, seed: int) -> SwitchTiming:
        """Return what was found, with the runs that it is for."""
        model = model_in_short(build_model(self.job, seed))
        found_for = FoundFor(str(file), self.job.name, model, self.job.batch_size, self.cluster.n)
        return SwitchTiming(fraction, self.first, self.then, found_for)


@dataclass(frozen=True)
class _Trying:
    """Does the runs of a setting."""

    search: _Search
    folder: Path
    display: Display
    processes: int

    def trials(self, fraction: float, seeds: range) -> Trials | None:
        """Return what the runs of a fraction came to; None if the user has ended them."""
        cells = cells_of(self.folder, [self.search.name(fraction)], seeds)
        report = run_cells(self.search.task(fraction), cells, self.display, self.processes)
        if report.interrupted:
            return None
        ends = [_end(cell, report) for cell in cells]
        return Trials(fraction, *(tuple(column) for column in zip(*ends, strict=True)))


def _found(
    trying: _Trying, bisection: Bisection, first_seeds: range, seeds: range, target: float | None
) -> SwitchSearch:
    """Do what Algorithm 1 asks for."""
    search = trying.search
    alone, tried = None, list[Trials]()

    def result(timing: SwitchTiming | None) -> SwitchSearch:
        told = (search.first, search.then, str(search.cluster), str(search.stop))
        return SwitchSearch(*told, bisection, alone, tuple(tried), tuple(seeds), trying.folder, timing)

    if first_seeds:
        alone = trying.trials(1.0, first_seeds)
        if alone is None:
            return result(None)
        _refuse_divergence(search.first, alone, first_seeds)
        if target is None:
            bisection = replace(bisection, target=mean(alone.accuracies))
    while (fraction := bisection.next_fraction([(each.fraction, each.accuracies) for each in tried])) is not None:
        trials = trying.trials(fraction, seeds)
        if trials is None:
            return result(None)
        tried.append(trials)
    found = bisection.found([(each.fraction, each.accuracies) for each in tried])
    return result(search.timing(found, trying.folder / TIMING, seeds[0]))


def _end(cell: Cell, report: Report) -> tuple[float, float]:
    """Return the final accuracy of a run, nan if it diverged, and its seconds."""
    if cell in report.errors:
        raise RunError(f"{cell}: {report.errors[cell]}; ask the same again to try it once more (--out {_above(cell)})")
    figures = count(SavedRun(cell.folder).history)
    if figures.stopped_by in DIVERGED:
        return nan, figures.time_s
    if figures.failed:
        raise RunError(
            f"{cell}: {figures.reason}; remove {cell.folder} and ask the same again to have it run once more"
        )
    return figures.metrics["accuracy"], figures.time_s


def _above(cell: Cell) -> Path:
    return cell.folder.parent.parent


def _refuse_divergence(first: str, alone: Trials, seeds: Iterable[int]) -> None:
    diverged = [seed for seed, accuracy in zip(seeds, alone.accuracies, strict=True) if accuracy != accuracy]
    if diverged:
        raise RunError(
            f"{first} alone diverged with seed {', '.join(map(str, diverged))}, so there is no accuracy to be kept, and "
            "nothing is stored; lower the learning rate of the job or clip its gradients (clip_norm=), and search again"
        )


def _first_runs(given: int | None, runs: int, target: float | None) -> int:
    if given is None:
        return runs if target is None else 0
    check("[0, inf)", Integral, first_runs=given)
    if given == 0 and target is None:
        raise UsageError("first_runs = 0 and no target: expected the accuracy to be kept, or runs that measure it")
    return given


def _check_stop(stop: Stop) -> None:
    early = [name for name in stop.given if name not in {"gradients", "epochs", "max_loss"}]
    if early:
        raise UsageError(
            f"stop {early[0]} = {stop.given[early[0]]:g} may end a run before its workload is done; a search compares "
            "runs at their end: give gradients= or epochs=, and max_loss= if you like"
        )


def _ended_when_diverged(stop: Stop, job: Job, cluster: Cluster | LocalCluster, seed: int) -> Stop:
    """Return the stop with a largest loss, from what the untrained model makes of the evaluation data."""
    model = build_model(job, seed).to(usable_device(cluster.device))
    metrics = evaluate(job, model, seed)
    accuracy = metrics.get("accuracy")
    if accuracy is None or not 0 <= accuracy <= 1:
        got = f"only {', '.join(metrics)}" if accuracy is None else f"an accuracy of {accuracy:g}"
        raise UsageError(
            f"job {job.name}: evaluation gives {got}; expected an accuracy as a share, returned from step as "
            "(loss, {'accuracy': ...})"
        )
    if stop.max_loss is not None or not 0 < metrics["loss"] < float("inf"):
        return stop
    return replace(stop, max_loss=float(f"{DIVERGED_AT * metrics['loss']:.3g}"))
