"""Write results/tables.md: every measured series with its spread, and DBW with the same seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import mean, median

from papers.dbw.settings import FIGURES, RESULTS
from papers.series import SPREAD, Runs, series_of, spread
from papers.store import Line, Store


def main(folder: Path = RESULTS) -> None:
    (folder / "tables.md").write_text("\n".join(tables(folder)) + "\n")


def tables(folder: Path) -> Iterator[str]:
    """Yield the lines of a page with one table per case."""
    for figure, about in FIGURES.items():
        lines = Store(folder / f"figure{figure}.jsonl").lines()
        for case in about.cases:
            by_series = series_of([line for line in lines if line["asked"]["case"] == case])
            rows = accuracies if about.job == "cifar10" else table
            if by_series:
                yield from [f"## Figure {figure}, {case}: {about.says}", "", *rows(by_series), ""]
    if lines := Store(folder / "figure1.jsonl").lines():
        yield from ["## Figure 1: estimates beside the truth, MNIST", "", *estimates(lines), ""]
    if lines := Store(folder / "figure3.jsonl").lines():
        yield from ["## Figure 3: mean relative error of E[T_kk], n = 5", "", *durations(lines), ""]
    if lines := Store(folder / "figureinterrupts.jsonl").lines():
        yield from ["## Push & Interrupt: mean relative error of T_k over 60 updates", "", *times(lines), ""]


def table(by_series: Mapping[str, Runs]) -> Iterator[str]:
    """Yield one row per series, the fastest first."""
    dbw = [name for name in by_series if name.startswith("dbw")]
    reference = by_series[min(dbw, key=len)] if dbw else {}
    yield f"| series | seeds | reached | seconds: {SPREAD} | updates | mean k | its time / DBW's, paired: {SPREAD} |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, runs in sorted(by_series.items(), key=lambda each: mean(line["time_s"] for line in each[1].values())):
        lines = runs.values()
        reached = sum(line["stopped_by"] in ("eval_loss", "accuracy") for line in lines)
        updates, k = median(line["updates"] for line in lines), mean(line["mean_k"] for line in lines)
        yield (
            f"| {name} | {len(runs)} | {reached} | {spread([line['time_s'] for line in lines], 1)} | {updates:.0f} "
            f"| {k:.1f} | {spread(ratios(runs, reference), 2)} |"
        )


def estimates(lines: Sequence[Line]) -> Iterator[str]:
    """Yield one row per cluster and seed: rank correlation of gain and decrease, and median errors."""
    yield "| cluster | seed | rank correlation | median error of the squared norm | of the variance |"
    yield "| --- | --- | --- | --- | --- |"
    for line in sorted(lines, key=lambda line: (line["asked"]["cluster"], line["asked"]["seed"])):
        errors = " | ".join(f"{100 * line['median_error'][name]:.0f} %" for name in ("squared_norm", "variance"))
        timing = line["asked"]["cluster"].partition("timing=")[2].removesuffix(")")
        yield f"| {timing} | {line['asked']['seed']} | {line['rank_correlation']:.2f} | {errors} |"


def durations(lines: Sequence[Line]) -> Iterator[str]:
    """Yield one row per estimator: its error, and the share of updates with estimates in the wrong order."""
    yield f"| estimate | seeds | error: {SPREAD} | wrong order: {SPREAD} |"
    yield "| --- | --- | --- | --- |"
    for name in ("estimated", "naive"):
        error, disorder = ([line[what][name] for line in lines] for what in ("error", "wrong_order"))
        yield f"| {name} | {len(lines)} | {spread(error, 3)} | {spread(disorder, 3)} |"


def times(lines: Sequence[Line]) -> Iterator[str]:
    """Yield one row per cluster and rule for k: the error of both estimates, and their paired ratio."""
    yield f"| cluster | k by | seeds | by (h, k): {SPREAD} | pooled: {SPREAD} | pooled / by (h, k) |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for case in dict.fromkeys(line["asked"]["case"] for line in lines):
        for name, runs in series_of([line for line in lines if line["asked"]["case"] == case]).items():
            errors = [line["error"] for line in runs.values()]
            by_h, pooled = ([each[which] for each in errors] for which in ("by h", "pooled"))
            ratio = spread([each["pooled"] / each["by h"] for each in errors], 2)
            yield f"| {case} | {name} | {len(runs)} | {spread(by_h, 3)} | {spread(pooled, 3)} | {ratio} |"


def accuracies(by_series: Mapping[str, Runs]) -> Iterator[str]:
    """Yield the rows of Fig. 5: seconds to 80 %, and the accuracy after 200 s."""
    yield f"| series | seeds | seconds to an accuracy of 80 %: {SPREAD} | accuracy after 200 s: {SPREAD} |"
    yield "| --- | --- | --- | --- |"
    for name, runs in by_series.items():
        curves = [list(zip(line["probe_s"], line["probe_accuracy"], strict=True)) for line in runs.values()]
        times_s = [min((s for s, accuracy in curve if accuracy >= 0.8), default=nan) for curve in curves]
        reached = [max((accuracy for s, accuracy in curve if s <= 200), default=nan) for curve in curves]
        yield f"| {name} | {len(runs)} | {spread(times_s, 1)} | {spread(reached, 3)} |"


def ratios(runs: Runs, reference: Runs) -> list[float]:
    """Return the time of each run in units of the reference, over the seeds that both have."""
    return [line["time_s"] / reference[seed]["time_s"] for seed, line in sorted(runs.items()) if seed in reference]


if __name__ == "__main__":
    main()
