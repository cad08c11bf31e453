"""Write results/tables.md: times compared with the paper's equations, cost of stragglers, and accuracies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from papers.dc_s3gd.run import store
from papers.dc_s3gd.settings import (
    BLOCKING,
    COMPENSATED,
    FIGURES,
    ITERATIONS,
    OVERLAPPING,
    RESULTS,
    STRAGGLERS,
    TABLE_I,
    Figure,
)
from papers.dc_s3gd.times import predicted_s
from papers.dc_s3gd.training import runs_of
from papers.series import SPREAD, Runs, series_of, spread
from papers.store import Line, Store

MEASURED = "measured.jsonl"


def main(folder: Path = RESULTS) -> None:
    (folder / "tables.md").write_text("\n".join(tables(folder)) + "\n")


def tables(folder: Path) -> Iterator[str]:
    """Yield the lines of a page with one table per set of results."""
    for name, figure in FIGURES.items():
        rows = list(accuracies(figure, store(name, folder).lines()))
        if rows:
            yield from [f"## {name}: {figure.says}", "", f"{SPREAD}.", "", *header(figure), *rows, ""]
    if lines := store("iterations", folder).lines():
        yield from ["## iterations: eq. (13) to (15), seconds where a gradient takes 1 s", "", *iterations(lines), ""]
    if lines := Store(folder / MEASURED).lines():
        yield from ["## measured: real ranks against eq. (13) to (15)", "", *measured(lines), ""]
    if lines := store("stragglers", folder).lines():
        yield from ["## stragglers: seconds in which N gradients are used, without communication", ""]
        yield from [*stragglers(lines), ""]
    yield from ["## Table I: theirs", "", *theirs()]


# -- accuracies --------------------------------------------------------------------------------------------------------


def header(figure: Figure) -> list[str]:
    """Return the first two lines of the table of a figure."""
    series = next(iter(figure.cases.values())).series
    names = ["case", "updates", "seeds", *(each.name for each in series)]
    names += [f"{COMPENSATED} less {other}, paired" for other in (BLOCKING, OVERLAPPING)]
    return [f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]


def accuracies(figure: Figure, lines: Sequence[Line]) -> Iterator[str]:
    """Yield one row per case: accuracies on the test data after the last update, with their spread."""
    for name, case in figure.cases.items():
        by_series = runs_of(case, lines)
        if not any(by_series.values()):
            continue
        cells = [name.replace("|", r"\|"), str(case.setup.updates), seeds_of(by_series)]
        cells += [spread([line["accuracy"] for line in runs.values()], 4) for runs in by_series.values()]
        compensated = by_series[COMPENSATED]
        cells += [spread(gains(compensated, by_series[other]), 4) for other in (BLOCKING, OVERLAPPING)]
        yield f"| {' | '.join(cells)} |"


def seeds_of(by_series: Mapping[str, Runs]) -> str:
    """Return the number of seeds of each series, as text."""
    numbers = sorted({len(runs) for runs in by_series.values() if runs})
    return " to ".join(map(str, {numbers[0]: None, numbers[-1]: None}))


def gains(runs: Runs, others: Runs) -> list[float]:
    """Return the gains in accuracy over the seeds that both have."""
    return [line["accuracy"] - others[seed]["accuracy"] for seed, line in sorted(runs.items()) if seed in others]


# -- times -------------------------------------------------------------------------------------------------------------


def iterations(lines: Sequence[Line]) -> Iterator[str]:
    """Yield one row per ratio: equation / simulation, and the time with one link for all of a server."""
    by_protocol = {line["asked"]["series"]: line for line in lines}
    names = [f"{name}: predicted / simulated, N=16" for name in by_protocol]
    names += [f"asp, one link for all, N={n}" for n in ITERATIONS.workers if "asp" in by_protocol]
    yield f"| t_ARed / t_C | {' | '.join(names)} |"
    yield "|" + " --- |" * (1 + len(names))
    for i, ratio in enumerate(ITERATIONS.all_reduce_s):
        at = 16 if 16 in ITERATIONS.workers else ITERATIONS.workers[0]
        cells = [
            f"{at_n(line, 'predicted_s', at)[i]:.3f} / {at_n(line, 'simulated_s', at)[i]:.3f}"
            for line in by_protocol.values()
        ]
        if "asp" in by_protocol:
            cells += [f"{at_n(by_protocol['asp'], 'on_one_link_s', n)[i]:.2f}" for n in ITERATIONS.workers]
        yield f"| {ratio:g} | {' | '.join(cells)} |"


def at_n(line: Line, what: str, n: int) -> list[float]:
    """Return the values of one N, for each t_ARed."""
    size = len(ITERATIONS.all_reduce_s)
    begin = ITERATIONS.workers.index(n) * size
    values: list[float] = line[what][begin : begin + size]
    return values


def measured(lines: Sequence[Line]) -> Iterator[str]:
    """Yield one row per measurement: seconds of an iteration of real ranks, with all repetitions."""
    yield f"| protocol | N | t_C, s | t_ARed, s | predicted, s | measured, s: {SPREAD} | ratio of the mean |"
    yield "|" + " --- |" * 7
    for line in lines:
        asked = line["asked"]
        seconds = line["iteration_s"]
        predicted = predicted_s(asked["series"], asked["compute_s"], asked["all_reduce_s"], asked.get("p2p_s", 0.0))
        cells = [asked["series"], asked["workers"], f"{asked['compute_s']:g}", f"{asked['all_reduce_s']:.3f}"]
        cells += [f"{predicted:.3f}", spread(seconds, 3), f"{fmean(seconds) / predicted:.2f}"]
        yield f"| {' | '.join(map(str, cells))} |"


def stragglers(lines: Sequence[Line]) -> Iterator[str]:
    """Yield one row per cluster and protocol: seconds for each N, and in units of all-reduce SGD."""
    names = ["seconds of a gradient", "protocol", *(f"N={n}" for n in STRAGGLERS.workers)]
    names += [f"N={n}: / {BLOCKING}" for n in STRAGGLERS.workers]
    names += ["seeds", "largest deviation of a seed", "played literally", f"staleness, N={STRAGGLERS.workers[-1]}"]
    yield f"| {' | '.join(names)} |"
    yield "|" + " --- |" * len(names)
    for cluster in STRAGGLERS.clusters:
        by_series = series_of([line for line in lines if line["asked"]["law"] == cluster])
        for name, runs in by_series.items():
            cells = [cluster, name.format(most="3N/4"), *_waiting(runs, by_series[BLOCKING])]
            yield f"| {' | '.join(cells)} |"


def _waiting(runs: Runs, blocking: Runs) -> Iterator[str]:
    seconds = np.array([line["seconds"] for line in runs.values()])
    ratios = np.array([line["seconds"] for line in runs.values()]) / [blocking[seed]["seconds"] for seed in runs]
    yield from (f"{each:.3f}" for each in seconds.mean(axis=0))
    yield from (f"{each:.2f}" for each in ratios.mean(axis=0))
    yield str(len(runs))
    yield f"{abs(seconds / seconds.mean(axis=0) - 1).max():.1%}"
    played = np.array([line["played_s"] for line in runs.values()], dtype=float).mean(axis=0)
    yield "-" if np.isnan(played).any() else ", ".join(f"{each:.3f}" for each in played)
    yield f"{fmean(line['staleness'][-1] for line in runs.values()):.1f}"


# -- the paper's own ---------------------------------------------------------------------------------------------------


def theirs() -> Iterator[str]:
    """Yield the rows of Table I, with the paper's seconds of an iteration."""
    yield r"| model | \|B\| | nodes | accuracy, % | images/s | images of a node | s an iteration | images/s of a node |"
    yield "|" + " --- |" * 8
    for row in TABLE_I:
        cells: list[object] = [
            row.model,
            row.batch_size,
            row.nodes,
            row.accuracy,
            row.images_per_s,
            row.batch_size // row.nodes,
        ]
        cells += [f"{row.iteration_s:.2f}", f"{row.images_per_s / row.nodes:.1f}"]
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
