"""`compare`: one job on one cluster with several protocols and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from paceline.catalogue.parser import parse_plan
from paceline.clusters.parser import parse_cluster, without_launcher
from paceline.core.duration import Duration
from paceline.core.stop import Stop
from paceline.errors import UsageError
from paceline.experiments.comparison import Comparison, FailedRunsError
from paceline.experiments.comparison_row import ComparisonRow
from paceline.experiments.runner.cell import GridSpec, RunSpec
from paceline.experiments.runner.ending import is_finished
from paceline.experiments.runner.folder import FolderKind, Request, cells_of, request
from paceline.experiments.runner.pool import Display, Report, at_a_time, displayed, open_folder, run_cells
from paceline.jobs.job import Job
from paceline.processes.shared_pickle import refuse_while_unpickling
from paceline.protocols.protocol import Plan, as_plan
from paceline.recording.run_folder import SavedRun
from paceline.recording.run_stats import count
from paceline.run.config import RunConfig
from paceline.run.train import AnyCluster, AnyProtocol
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import split_top
from paceline.utils.validation import check_optional_range


@checked_types
def compare(
    job: Job,
    *,
    protocols: str | Sequence[AnyProtocol] | Mapping[str, AnyProtocol],
    cluster: AnyCluster,
    stop: str | Stop,
    seeds: int | Sequence[int] = 3,
    out: str | Path | None = None,
    processes: int | None = None,
    evaluate_every: str | Duration | None = None,
    worker_timeout_s: float | None = None,
    price: float | None = None,
    progress: bool | None = None,
    display: Display | None = None,
) -> Comparison:
    """Train a job with several protocols and seeds, and compare the runs.

    The same call resumes an interrupted comparison; finished runs are not repeated.

    Args:
        job: job to train.
        protocols: protocols as for `train`: a list, a text such as "bsp, k_sync(k=12), asp", or a mapping from names of
            your choice.
        cluster: cluster of every run, as for `train`.
        stop: stop of every run, as for `train`; the time to its loss or accuracy is compared.
        seeds: seeds as [0, 1, 2], each >= 0, or their number, >= 1, counted from 0.
        out: folder for all runs. If not given, runs/compare-JOB-1, -2, ...: the first interrupted or unused one.
        processes: number of parallel runs, >= 1; None for one per core on a simulated cluster, and for one on a
            `LocalCluster`, whose runs take real time. With 1, the runs take place in this process.
        evaluate_every: interval between evaluations, as for `train`.
        worker_timeout_s: timeout of a silent worker in seconds, > 0, as for `train`.
        price: price of a worker-hour in any currency, >= 0.
        progress: whether to show the progress on standard error; None for on a terminal and in a notebook only.
        display: display of the progress in place of `ProgressBars`.

    Returns:
        The comparison, which prints as a table.

    Raises:
        UsageError: an argument is invalid, or the folder contains another comparison.
        RunError: the folder cannot be written.
        FailedRunsError: some runs crashed. It is raised after all other runs, when the table is saved, and has the
            ``comparison`` as an attribute. The same call repeats the crashed runs. A run that missed the target or
            diverged is a result, not a failure.
    """
    refuse_while_unpickling()
    check_optional_range("[0, inf)", price=price)
    plans = _plans(protocols)
    cluster = without_launcher(parse_cluster(cluster) if isinstance(cluster, str) else cluster, "compare")
    stop = Stop.parse(stop) if isinstance(stop, str) else stop
    every = Duration.parse(evaluate_every) if isinstance(evaluate_every, str) else evaluate_every
    common = partial(
        RunConfig,
        job=job,
        cluster=cluster,
        stop=stop,
        seed=0,
        evaluate_every=every,
        worker_timeout_s=worker_timeout_s,
    )
    grid = GridSpec({name: common(plan=plan) for name, plan in plans.items()})
    grid.check()
    at_once = at_a_time(cluster, processes)
    given = request(
        job,
        _seeds(seeds),
        protocols={name: str(plan) for name, plan in plans.items()},
        cluster=str(cluster),
        stop=str(stop),
        evaluate_every=every and str(every),
        worker_timeout_s=worker_timeout_s,
    )
    with (
        closing(open_folder(COMPARISON, out, "compare", job, given)) as folder,
        displayed(display, progress) as shown,
    ):
        cells = _cells(folder.path, folder.request)
        shown.plan(len(cells), sum(is_finished(cell.folder) for cell in cells))
        report = run_cells(grid, cells, shown, at_once)
        rows = [_row(name, [cell for cell in cells if cell.name == name], report) for name in plans]
        comparison = Comparison(rows=rows, stop=stop, folder=folder.path, price=price, interrupted=report.interrupted)
        if not report.interrupted:
            folder.save({"table.txt": comparison.text().encode(), "table.json": comparison.to_json()})
        if comparison.failures and not report.interrupted:
            raise FailedRunsError(comparison)
    return comparison


def _cells(path: Path, given: Request) -> list[RunSpec]:
    return cells_of(path, given["protocols"], given["seeds"])


def _is_complete(path: Path, given: Request) -> bool:
    return all(is_finished(cell.folder) for cell in _cells(path, given))


COMPARISON = FolderKind("comparison", "compare.json", _is_complete)


def _plans(protocols: str | Sequence[AnyProtocol] | Mapping[str, AnyProtocol]) -> dict[str, Plan]:
    if isinstance(protocols, str):
        protocols = [text.strip() for text in split_top(protocols, ",")]
    if isinstance(protocols, Mapping):
        return {name: _plan(protocol) for name, protocol in protocols.items()}
    plans: dict[str, Plan] = {}
    for protocol in protocols:
        name = protocol if isinstance(protocol, str) else str(as_plan(protocol))
        if name in plans:
            raise UsageError(f"{name} is given twice; give it once, or give a mapping of names to protocols")
        plans[name] = _plan(protocol)
    if not plans:
        raise UsageError("no protocols are given; give for example 'bsp, asp'")
    return plans


def _plan(protocol: AnyProtocol) -> Plan:
    return parse_plan(protocol) if isinstance(protocol, str) else as_plan(protocol)


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    given = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not given or len(set(given)) < len(given) or min(given) < 0:
        raise UsageError(f"seeds={seeds!r}, expected their number, >= 1, or different whole numbers >= 0")
    return given


def _row(name: str, cells: Sequence[RunSpec], report: Report) -> ComparisonRow:
    """Return the row of a protocol, with the statistics of its finished runs from their logs."""
    finished = [cell for cell in cells if is_finished(cell.folder)]
    return ComparisonRow(
        protocol=name,
        runs={cell.seed: count(SavedRun(cell.folder).history) for cell in finished},
        crashes={cell.seed: report.crashes[cell] for cell in cells if cell in report.crashes},
        unfinished=[cell.seed for cell in cells if cell not in finished and cell not in report.crashes],
    )
