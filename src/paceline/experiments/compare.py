"""`compare`: the same job on the same cluster with several protocols, over several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from paceline.catalogue.parser import parse_plan
from paceline.clusters.parser import parse_cluster
from paceline.clusters.torchrun import without_torchrun
from paceline.core.duration import Duration
from paceline.core.stop import Stop
from paceline.errors import UsageError
from paceline.experiments.comparison import Comparison, ComparisonRow, FailedRunsError
from paceline.experiments.runner.cell import GridSpec, RunSpec
from paceline.experiments.runner.ending import is_finished
from paceline.experiments.runner.folder import FolderKind, Question, cells_of, question
from paceline.experiments.runner.pool import Display, Report, at_a_time, displayed, open_folder, run_cells
from paceline.jobs.job import Job
from paceline.processes.shared_pickle import refuse_while_unpickling
from paceline.protocols.protocol import Plan, as_plan
from paceline.recording.run_folder import SavedRun
from paceline.recording.run_stats import count
from paceline.run.train import AnyCluster, AnyProtocol
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import split_top


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
    """Train a job with every protocol and every seed, and return the table of what they took.

    A comparison that was interrupted goes on when the same is asked again: finished runs are not done again.

    Args:
        job: what to train.
        protocols: as for `train`, several; or their text, "bsp, k_sync(k=12), asp"; or by a name of your own.
        cluster: as for `train`.
        stop: as for `train`; the time to its loss or accuracy is what is compared.
        seeds: as [0, 1, 2], or how many, from 0.
        out: folder for all runs; runs/compare-JOB-1, -2, ... if not given, one that was interrupted first.
        processes: runs at a time; one a core on a simulated cluster, and one on a `LocalCluster`, whose runs take
            real time. With 1, they run in this process.
        evaluate_every: as for `train`.
        worker_timeout_s: as for `train`.
        price: of a worker-hour, in any currency.
        progress: whether to show how the runs are doing, on standard error; None for on a terminal and in a notebook
            only.
        display: shows it instead, as `ProgressBars` does.

    Raises:
        UsageError: what was asked for cannot work, or the folder holds another comparison.
        RunError: the folder cannot be written.
        FailedRunsError: runs crashed. It is raised after all others are done and the table is saved; its `comparison`
            is what would have been returned. The same call runs the crashed ones again. A run that missed the target
            or diverged is a result, and raises nothing.
    """
    refuse_while_unpickling()
    task = GridSpec(
        job=job,
        plans=_plans(protocols),
        cluster=without_torchrun(parse_cluster(cluster) if isinstance(cluster, str) else cluster, "compare"),
        stop=Stop.parse(stop) if isinstance(stop, str) else stop,
        evaluate_every=Duration.parse(evaluate_every) if isinstance(evaluate_every, str) else evaluate_every,
        worker_timeout_s=worker_timeout_s,
    )
    task.check()
    at_once = at_a_time(task.cluster, processes)
    asked = question(
        job,
        _seeds(seeds),
        protocols={name: str(plan) for name, plan in task.plans.items()},
        cluster=str(task.cluster),
        stop=str(task.stop),
        evaluate_every=evaluate_every and str(task.evaluate_every),
        worker_timeout_s=worker_timeout_s,
    )
    with (
        closing(open_folder(COMPARISON, out, "compare", job, asked)) as folder,
        displayed(display, progress) as shown,
    ):
        cells = _cells(folder.path, folder.question)
        shown.plan(len(cells), sum(is_finished(cell.folder) for cell in cells))
        report = run_cells(task, cells, shown, at_once)
        rows = [_row(name, [cell for cell in cells if cell.name == name], report) for name in task.plans]
        comparison = Comparison(rows, task.stop, folder.path, price, report.interrupted)
        if not report.interrupted:
            folder.save({"table.txt": comparison.text().encode(), "table.json": comparison.to_json()})
        if comparison.failures and not report.interrupted:
            raise FailedRunsError(comparison)
    return comparison


def _cells(path: Path, asked: Question) -> list[RunSpec]:
    return cells_of(path, asked["protocols"], asked["seeds"])


def _is_answered(path: Path, asked: Question) -> bool:
    return all(is_finished(cell.folder) for cell in _cells(path, asked))


COMPARISON = FolderKind("comparison", "compare.json", _is_answered)


def _plans(protocols: str | Sequence[AnyProtocol] | Mapping[str, AnyProtocol]) -> dict[str, Plan]:
    if isinstance(protocols, str):
        protocols = [text.strip() for text in split_top(protocols, ",")]
    if isinstance(protocols, Mapping):
        return {name: _plan(protocol) for name, protocol in protocols.items()}
    plans: dict[str, Plan] = {}
    for protocol in protocols:
        name = protocol if isinstance(protocol, str) else str(as_plan(protocol))
        if name in plans:
            raise UsageError(f"{name} is compared with itself; expected it once, or a mapping of names to protocols")
        plans[name] = _plan(protocol)
    if not plans:
        raise UsageError("there are no protocols to compare; give for example 'bsp, asp'")
    return plans


def _plan(protocol: AnyProtocol) -> Plan:
    return parse_plan(protocol) if isinstance(protocol, str) else as_plan(protocol)


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    given = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not given or len(set(given)) < len(given) or min(given) < 0:
        raise UsageError(f"seeds = {seeds!r}, expected how many, >= 1, or different whole numbers >= 0")
    return given


def _row(name: str, cells: Sequence[RunSpec], report: Report) -> ComparisonRow:
    """Read the figures of what is finished from the logs."""
    finished = [cell for cell in cells if is_finished(cell.folder)]
    return ComparisonRow(
        name,
        runs={cell.seed: count(SavedRun(cell.folder).history) for cell in finished},
        crashes={cell.seed: report.crashes[cell] for cell in cells if cell in report.crashes},
        unfinished=[cell.seed for cell in cells if cell not in finished and cell not in report.crashes],
    )
