"""`search_switch`: when to leave one protocol for another, found by trial runs."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from math import inf, isnan
from numbers import Integral
from pathlib import Path
from statistics import mean

from paceline.clusters.local import LocalCluster
from paceline.clusters.parser import parse_cluster
from paceline.clusters.simulated import Cluster
from paceline.clusters.torchrun import without_torchrun
from paceline.core.duration import Duration
from paceline.core.stop import Stop
from paceline.errors import RunError, UsageError
from paceline.experiments.runner.ending import is_finished
from paceline.experiments.runner.folder import FolderKind, Question, question
from paceline.experiments.runner.pool import Display, at_a_time, displayed, open_folder
from paceline.experiments.switch_point.bisection import Bisection
from paceline.experiments.switch_point.result import SwitchSearch
from paceline.experiments.switch_point.trials import Trial, Trials, Trying
from paceline.jobs.job import Job
from paceline.processes.shared_pickle import refuse_while_unpickling
from paceline.run.train import AnyCluster
from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range
from paceline.worker.evaluation import evaluate
from paceline.worker.torch_utils import build_model, usable_device

TIMING = "timing.toml"
DIVERGED_AT = 10.0


def _is_answered(path: Path, asked: Question) -> bool:
    return (path / TIMING).exists()


SEARCH = FolderKind("search", "search.json", _is_answered)


@checked_types
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
    evaluate_every: str | Duration | None = None,
    worker_timeout_s: float | None = None,
    progress: bool | None = None,
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
        progress: whether to show how the runs are doing, as for `compare`.
        display: shows it instead, as `ProgressBars` does.

    Raises:
        UsageError: what was asked for cannot work, or the folder holds another search.
        RunError: a run of the first protocol alone diverged, so that there is nothing to be kept, or a run failed for
            another reason; nothing is stored then but the runs.

    Source: Li et al. (Sync-Switch), ICDCS 2021, Sect. IV-B1, Algorithm 1.
    """
    refuse_while_unpickling()
    cluster = without_torchrun(parse_cluster(cluster) if isinstance(cluster, str) else cluster, "search")
    stop = Stop.parse(stop) if isinstance(stop, str) else stop
    check_range("[1, inf)", Integral, runs=runs)
    check_range("[0, inf)", Integral, seed=seed)
    of_first = _first_runs(first_runs, runs, target)
    bisection = Bisection(1.0 if target is None else target, margin, settings, two_sided)
    _check_stop(stop)
    every = Duration.parse(evaluate_every) if isinstance(evaluate_every, str) else evaluate_every
    trial = Trial(job, cluster, stop, first, then, every, worker_timeout_s)
    trial.check()
    at_once = at_a_time(cluster, processes)
    trial = replace(trial, stop=_ended_when_diverged(stop, job, cluster, seed))
    asked = question(
        job,
        range(seed, seed + runs),
        first=first,
        then=then,
        first_runs=of_first,
        cluster=str(cluster),
        stop=str(stop),
        target=target,
        margin=margin,
        settings=settings,
        two_sided=two_sided,
        evaluate_every=every and str(every),
        worker_timeout_s=worker_timeout_s,
    )
    with closing(open_folder(SEARCH, out, "search", job, asked)) as folder, displayed(display, progress) as shown:
        trying = Trying(trial, folder.path, shown, at_once)
        trying.display.plan(of_first + settings * runs, sum(map(is_finished, folder.path.glob("*/seed-*"))))
        nothing_yet = SwitchSearch(trial, bisection, tuple(range(seed, seed + runs)), folder.path)
        search = _carried_out(nothing_yet, trying, range(seed, seed + of_first), measures=target is None)
        if not search.interrupted:
            folder.save({TIMING: search.to_toml().encode(), "table.txt": search.text().encode()})
    return search


def _carried_out(search: SwitchSearch, trying: Trying, first_seeds: range, measures: bool) -> SwitchSearch:
    """Do what Algorithm 1 asks for, with the target measured or not; return what there is if the user ends it."""
    if first_seeds:
        alone = trying.trials(1.0, first_seeds)
        if alone is None:
            return search
        _refuse_divergence(alone, first_seeds, trying.trial.first)
        target = mean(alone.accuracies) if measures else search.bisection.target
        search = replace(search, alone=alone, bisection=replace(search.bisection, target=target))
    while (fraction := search.next_fraction) is not None:
        trials = trying.trials(fraction, search.seeds)
        if trials is None:
            return search
        search = replace(search, tried=(*search.tried, trials))
    return replace(search, timing=trying.trial.timing(search.smallest, trying.folder / TIMING, search.seeds[0]))


def _refuse_divergence(alone: Trials, seeds: range, first: str) -> None:
    diverged = [str(seed) for seed, accuracy in zip(seeds, alone.accuracies, strict=True) if isnan(accuracy)]
    if diverged:
        raise RunError(
            f"{first} alone diverged (seed {', '.join(diverged)}), so there is no accuracy to be kept: nothing is "
            "stored; lower the learning rate of the job or clip its gradients (clip_norm=), and search again"
        )


def _first_runs(given: int | None, runs: int, target: float | None) -> int:
    if given is None:
        return runs if target is None else 0
    check_range("[0, inf)", Integral, first_runs=given)
    if given == 0 and target is None:
        raise UsageError("first_runs = 0 and no target: expected the accuracy to be kept, or runs that measure it")
    return given


def _check_stop(stop: Stop) -> None:
    early = [text for text in stop.conditions if text.partition("=")[0] not in {"gradients", "epochs", "max_loss"}]
    if early:
        raise UsageError(
            f"stop {early[0]} may end a run before its workload is done; a search compares "
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
    if stop.max_loss is not None or not 0 < metrics["loss"] < inf:
        return stop
    return replace(stop, max_loss=float(f"{DIVERGED_AT * metrics['loss']:.3g}"))
