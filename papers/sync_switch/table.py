"""Write results/tables.md: every series with its accuracy and times, its reference, and the predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from statistics import fmean, mean

import paceline as pl
from papers.series import SPREAD, Runs, series_of, spread
from papers.store import Line
from papers.sync_switch.predicted import Workers, mean_played_s, theirs_s
from papers.sync_switch.run import store
from papers.sync_switch.settings import AWARE, FIGURES, PERCENT, RESULTS, SETUPS, Case, switch
from papers.sync_switch.training import lines_of

MARGIN = 0.01  # margin below the accuracy to reach
ELASTIC = AWARE[1]
SHARES = {"bsp": 1.0, "asp": 0.0, **{switch(percent): percent / 100 for percent in (3.125, 6.25, 12.5, 25, 50, 75)}}


def main(folder: Path = RESULTS) -> None:
    (folder / "tables.md").write_text("\n".join(tables(folder)) + "\n")


def tables(folder: Path) -> Iterator[str]:
    """Yield the lines of a page with a table for each panel, and one of the speed-ups of the paper's Table I."""
    for name, figure in FIGURES.items():
        lines = store(name, folder).lines()
        for panel, case in figure.cases.items():
            if found := lines_of(case.setup, case.series, lines):
                title = name if not name.isdecimal() else f"Figure {name}"
                yield from [f"## {title}, {panel}: {figure.says}", "", *rows(series_of(found), case), ""]
    yield from ["## Table I: speed-up over BSP at the paces that the authors measured", "", *speed_ups()]


def rows(by_series: Mapping[str, Runs], case: Case) -> Iterator[str]:
    """Yield one row per series."""
    reference = by_series.get(case.reference, {})
    target = fmean([line["accuracy"] for line in reference.values()]) if reference else nan
    yield (
        f"| series | seeds | accuracy: {SPREAD} | less {case.reference} | virtual s: {SPREAD} "
        f"| predicted s | time / {case.reference}'s, paired: {SPREAD} | s to its accuracy less {MARGIN:g} |"
    )
    yield "|" + " --- |" * 8
    for name, runs in by_series.items():
        accuracies = [line["accuracy"] for line in runs.values()]
        cells = [
            name,
            f"{len(runs)}{trouble(list(runs.values()))}",
            spread(accuracies, 4),
            f"{round(mean(accuracies) - target, 4) + 0.0:+.4f}",  # no -0.0000
            spread([line["time_s"] for line in runs.values()], 0),
            predicted(name.partition(", lr=")[0], case),
            spread(ratios(runs, reference), 3),
            reached(runs, target - MARGIN),
        ]
        yield f"| {' | '.join(cells)} |"


def trouble(lines: Sequence[Line]) -> str:
    """Return the number of runs that did not finish, in words; empty if all did."""
    ended = sum(line["stopped_by"] == "gradients" for line in lines)
    return "" if ended == len(lines) else f" ({len(lines) - ended} failed)"


def predicted(name: str, case: Case) -> str:
    """Return the seconds of the plan without paceline; for an elastic plan those of an ideal one."""
    cluster, workload = case.setup.cluster, case.setup.workload
    is_known = isinstance(cluster.timing, pl.timing.ShiftedExponential) and all(
        isinstance(each, pl.timing.Periodic) for each in cluster.slowdowns
    )
    if not is_known or name not in (*SHARES, ELASTIC):
        return "-"
    if name == ELASTIC:
        return f">= {Workers.of(cluster).ideal_s(workload, PERCENT / 100):.0f}"
    return f"{mean_played_s(Workers.of(cluster), workload, SHARES[name]):.0f}"


def ratios(runs: Runs, reference: Runs) -> list[float]:
    """Return the time of each run in units of that of the reference, over the seeds that both have."""
    return [line["time_s"] / reference[seed]["time_s"] for seed, line in sorted(runs.items()) if seed in reference]


def reached(runs: Runs, target: float) -> str:
    """Return the seconds to an accuracy, and the number of runs that did not reach it."""
    times_s = [time_to(line, target) for line in runs.values()]
    missed = sum(isnan(time_s) for time_s in times_s)
    there = spread([time_s for time_s in times_s if not isnan(time_s)], 0)
    return f"{there}, {missed} missed it" if missed else there


def time_to(line: Line, target: float) -> float:
    """Return the time of the first evaluation with this accuracy, nan if there is none."""
    curve = zip(line["test_s"], line["test_accuracy"], strict=True)
    return float(min((at_s for at_s, accuracy in curve if accuracy is not None and accuracy >= target), default=nan))


def speed_ups() -> Iterator[str]:
    """Yield one row per set-up: the paper's speed-up, that of its own rates, and that of workers that wait for all."""
    yield "| set-up | plan | theirs | at their paces | the slowest worker and a barrier alone |"
    yield "| --- | --- | --- | --- | --- |"
    for (name, (setup, percent)), theirs in zip(SETUPS.items(), ("5.13", "1.66", "1.87"), strict=True):
        assert setup.measured is not None
        share, n = percent / 100, setup.cluster.n
        paces = [theirs_s(setup.measured, n, setup.workload, each) for each in (1.0, share)]
        bsp_s, asp_s = (
            pl.simulate(protocol, setup.cluster, updates=updates).seconds_per_update
            for protocol, updates in (("bsp", 2000), ("asp", 20_000))
        )
        barrier = bsp_s / n / (share * bsp_s / n + (1 - share) * asp_s)
        yield f"| {name} | {switch(percent)} | {theirs} | {paces[0] / paces[1]:.2f} | {barrier:.2f} |"


if __name__ == "__main__":
    main()
