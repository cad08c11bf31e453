"""`search_switch`: search for the time to switch from one protocol to another, by trial runs."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from math import inf, isnan
from numbers import Integral
from pathlib import Path
from statistics import mean, stdev
from typing import Literal

from paceline.catalogue.parser import switch_plan
from paceline.clusters.local import LocalCluster
from paceline.clusters.parser import parse_cluster, without_launcher
from paceline.clusters.simulated import Cluster
from paceline.core.duration import Duration
from paceline.core.stop import Stop
from paceline.errors import RunError, UsageError
from paceline.experiments.runner.ending import is_finished
from paceline.experiments.runner.folder import FolderKind, request
from paceline.experiments.runner.pool import Display, at_a_time, displayed, open_folder
from paceline.experiments.switch_point.bisection import Bisection
from paceline.experiments.switch_point.result import SwitchSearch
from paceline.experiments.switch_point.trials import AccuracyOf, TrialRunner, Trials, TrialSpec
from paceline.jobs.job import Job
from paceline.processes.shared_pickle import refuse_while_unpickling
from paceline.run.config import RunConfig
from paceline.run.train import AnyCluster
from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range
from paceline.worker.evaluation import evaluate
from paceline.worker.torch_utils import build_model, usable_device

TIMING = "timing.toml"
DIVERGED_AT = 10.0


SEARCH = FolderKind("search", "search.json", is_complete=lambda path, request: (path / TIMING).exists())


@checked_types
def search_switch(
    job: Job,
    *,
    cluster: AnyCluster,
    stop: str | Stop,
    first: str = "bsp",
    then: str = "asp",
    target: float | None = None,
    margin: float | Literal["auto"] = 0.01,
    settings: int = 5,
    runs: int = 3,
    first_runs: int | None = None,
    seed: int = 0,
    two_sided: bool = False,
    accuracy: AccuracyOf = "final",
    out: str | Path | None = None,
    processes: int | None = None,
    evaluate_every: str | Duration | None = None,
    worker_timeout_s: float | None = None,
    progress: bool | None = None,
    display: Display | None = None,
) -> SwitchSearch:
    """Find the smallest share of the workload under one protocol after which a faster one keeps the accuracy.

    Without a target, the first protocol runs alone to the end, and the mean of its final accuracies is the target.
    Then shares of the workload are tried by bisection (``Bisection``), each with ``runs`` runs. A share is accepted if
    the mean final accuracy is at least target - margin. The final accuracy of a run is that of its last version. With
    ``accuracy="converged"`` it is the accuracy after five evaluations in a row within 0.1 %, and that of the last
    version if there are no such five.

    A run that diverges ends and fails its setting. The other runs of the setting still take place, so that the result
    does not depend on their order. A run diverges if gradients are not finite, or if its mean training loss reaches
    ``max_loss`` of the stop. If that is not given, it is ten times the loss of the untrained model on
    ``job.eval_data``, if that loss is positive.

    The same call resumes an interrupted search; finished runs are not repeated.

    Args:
        job: job to train, with ``eval_data`` for an accuracy.
        cluster: cluster of every run, as for `train`.
        stop: stop that fixes the workload, for example "epochs=20" or "gradients=64000". Apart from that it may only
            have a max_loss, because the search compares accuracies at the end of runs.
        first: text of the first protocol, for example "bsp" or "ssp(lead=2)".
        then: text of the second protocol.
        target: target accuracy, in (0, 1]; measured if not given.
        margin: largest shortfall of the mean accuracy, in [0, 1), or "auto": the standard deviation of the accuracies
            of the first protocol alone, which needs two such runs.
        settings: number of shares to try, >= 1; the result is at most 2^-settings too large.
        runs: number of runs of each share, >= 1.
        first_runs: number of runs of the first protocol alone, >= 0, which are also the reference for times. If not
            given, ``runs`` without a target and 0 with one.
        seed: seed of the first run of each setting, >= 0; each further run has the next seed.
        two_sided: whether a mean above target + margin is also rejected, as in the printed algorithm.
        accuracy: accuracy of a run that counts: the "final" one of its last version, or the paper's "converged" one,
            which needs ``evaluate_every``.
        out: folder for all runs and for timing.toml. If not given, runs/search-JOB-1, -2, ...: the first interrupted or
            unused one.
        processes: number of parallel runs, >= 1, as for `compare`; at most the runs of a setting.
        evaluate_every: interval between evaluations, as for `train`; the last version is always evaluated.
        worker_timeout_s: timeout of a silent worker in seconds, > 0, as for `train`.
        progress: whether to show the progress, as for `compare`.
        display: display of the progress in place of `ProgressBars`.

    Returns:
        The search, with the result and its table.

    Raises:
        UsageError: an argument is invalid, or the folder contains another search.
        RunError: a run of the first protocol alone diverged, so that there is no target, or a run failed for another
            reason; the runs are kept.

    Source: Li et al. (Sync-Switch), ICDCS 2021, Sect. IV-B1, Algorithm 1; Sect. VI-A for the converged accuracy. The
    paper says that beta can be "set automatically", but not how; "auto" is paceline's rule.
    """
    refuse_while_unpickling()
    cluster = without_launcher(parse_cluster(cluster) if isinstance(cluster, str) else cluster, "search")
    stop = Stop.parse(stop) if isinstance(stop, str) else stop
    check_range("[1, inf)", Integral, runs=runs)
    check_range("[0, inf)", Integral, seed=seed)
    of_first = _first_runs(first_runs, runs, target, margin)
    bisection = Bisection(
        target=1.0 if target is None else target,
        margin=0.0 if margin == "auto" else margin,
        settings=settings,
        two_sided=two_sided,
    )
    _check_stop(stop)
    every = Duration.parse(evaluate_every) if isinstance(evaluate_every, str) else evaluate_every
    config = RunConfig(
        job=job,
        plan=switch_plan(1.0, first, then),
        cluster=cluster,
        stop=stop,
        seed=seed,
        evaluate_every=every,
        worker_timeout_s=worker_timeout_s,
    )
    TrialSpec(config=config, first=first, then=then, accuracy=accuracy).check()
    at_once = at_a_time(cluster, processes)
    config = replace(config, stop=_ended_when_diverged(stop, job, cluster, seed))
    trial = TrialSpec(config=config, first=first, then=then, accuracy=accuracy)
    given = request(
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
        accuracy=accuracy,
        evaluate_every=every and str(every),
        worker_timeout_s=worker_timeout_s,
    )
    with closing(open_folder(SEARCH, out, "search", job, given)) as folder, displayed(display, progress) as shown:
        runner = TrialRunner(trial=trial, folder=folder.path, display=shown, processes=at_once)
        runner.display.plan(of_first + settings * runs, sum(map(is_finished, folder.path.glob("*/seed-*"))))
        nothing_yet = SwitchSearch(
            trial=trial, bisection=bisection, seeds=tuple(range(seed, seed + runs)), folder=folder.path
        )
        search = _search(nothing_yet, runner, range(seed, seed + of_first), target, margin)
        if not search.interrupted:
            folder.save({TIMING: search.to_toml().encode(), "table.txt": search.text().encode()})
    return search


def _search(
    search: SwitchSearch,
    runner: TrialRunner,
    first_seeds: range,
    target: float | None,
    margin: float | Literal["auto"],
) -> SwitchSearch:
    """Return the search after Algorithm 1, or as far as it came if the user interrupted it."""
    if first_seeds:
        alone = runner.trials(1.0, first_seeds)
        if alone is None:
            return search
        _refuse_divergence(alone, first_seeds, runner.trial.first)
        bisection = replace(
            search.bisection,
            target=mean(alone.accuracies) if target is None else target,
            margin=stdev(alone.accuracies) if margin == "auto" else margin,
        )
        search = replace(search, alone=alone, bisection=bisection)
    while (fraction := search.next_fraction) is not None:
        trials = runner.trials(fraction, search.seeds)
        if trials is None:
            return search
        search = replace(search, tried=(*search.tried, trials))
    return replace(search, timing=runner.trial.timing(search.smallest, runner.folder / TIMING, search.seeds[0]))


def _refuse_divergence(alone: Trials, seeds: range, first: str) -> None:
    diverged = [str(seed) for seed, accuracy in zip(seeds, alone.accuracies, strict=True) if isnan(accuracy)]
    if diverged:
        raise RunError(
            f"{first} alone diverged (seed {', '.join(diverged)}), so there is no target accuracy; lower the learning "
            "rate of the job or clip its gradients (clip_norm=), and search again"
        )


def _first_runs(given: int | None, runs: int, target: float | None, margin: float | Literal["auto"]) -> int:
    of_first = given if given is not None else runs if target is None else 0
    check_range("[0, inf)", Integral, first_runs=of_first)
    if of_first == 0 and target is None:
        raise UsageError("first_runs=0 and no target: give the target accuracy, or runs that measure it")
    if margin == "auto" and of_first < 2:
        raise UsageError(
            f"margin='auto' is the deviation of the first protocol's accuracies, and first_runs is {of_first}; "
            "give first_runs=2 or more, or a number as margin"
        )
    return of_first


def _check_stop(stop: Stop) -> None:
    early = [text for text in stop.conditions if text.partition("=")[0] not in {"gradients", "epochs", "max_loss"}]
    if early:
        raise UsageError(
            f"stop {early[0]} may end a run before the end of its workload, where a search compares runs; give "
            "gradients= or epochs=, and optionally max_loss="
        )


def _ended_when_diverged(stop: Stop, job: Job, cluster: Cluster | LocalCluster, seed: int) -> Stop:
    """Return the stop with a max_loss, from the loss of the untrained model on the evaluation data."""
    model = build_model(job, seed).to(usable_device(cluster.device))
    metrics = evaluate(job, model, seed)
    accuracy = metrics.get("accuracy")
    if accuracy is None or not 0 <= accuracy <= 1:
        got = f"only {', '.join(metrics)}" if accuracy is None else f"an accuracy of {accuracy:g}"
        raise UsageError(
            f"job {job.name}: the evaluation returns {got}; expected an accuracy as a share: return "
            "(loss, {'accuracy': ...}) from step"
        )
    if stop.max_loss is not None or not 0 < metrics["loss"] < inf:
        return stop
    return replace(stop, max_loss=float(f"{DIVERGED_AT * metrics['loss']:.3g}"))
