"""Write results/tables.md: seconds to the target at the own rate and under the rule "noise", and final losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import fmean

from paceline.utils.confidence_intervals import interval_of_mean
from papers.auto.settings import CASES, FINAL_GRADIENTS, RESULTS, SEEDS
from papers.auto.training import mean_s
from papers.series import SPREAD, spread
from papers.store import Line, figure_store

OWN, RULE = "own rate", "noise"
BSP = f"bsp, {OWN}"


def main(folder: Path = RESULTS) -> None:
    (folder / "tables.md").write_text("\n".join(tables(folder)) + "\n")


def tables(folder: Path) -> Iterator[str]:
    """Yield the lines of a page with one table per case."""
    found = {
        (line["asked"]["case"], *line["asked"]["series"].rsplit(", ", 1)): line
        for figure in ("tuned", "ruled")
        for line in figure_store(figure, folder).lines()
    }
    for case, about in CASES.items():
        rows = {(protocol, rule): line for (of, protocol, rule), line in found.items() if of == case}
        if rows:
            seeds = f"{about.seeds} seeds, virtual seconds to loss {about.target:g}"
            yield from [f"## {case}", "", f"{seeds}: {SPREAD}. A ratio is that of paired times.", ""]
            yield from [*table(rows), ""]
    for case in FINAL_GRADIENTS:
        ends = {
            line["asked"]["series"]: line["runs"]
            for line in figure_store("final", folder).lines()
            if line["asked"]["case"] == case
        }
        if BSP in ends:
            yield from [*finals(case, ends), ""]


def table(rows: Mapping[tuple[str, str], Line]) -> Iterator[str]:
    """Yield a table; the last row compares `auto` with the protocol that is fastest at its own rate."""
    own = {protocol: line for (protocol, rule), line in rows.items() if rule == OWN}
    ruled = {protocol: line for (protocol, rule), line in rows.items() if rule == RULE}
    yield "| protocol | own rate | seconds at it | seconds under the rule | ratio |"
    yield "| --- | --- | --- | --- | --- |"
    for protocol, line in own.items():
        rule = ruled.get(protocol)
        columns = (_times(rule), _ratio(rule, line)) if rule is not None else ("-", "-")
        yield f"| {protocol} | {line['lr']:.4g} | {_times(line)} | {' | '.join(columns)} |"
    if "auto" in ruled and own:
        best = min(own, key=lambda protocol: mean_s(own[protocol]["runs"]))
        yield f"| auto, against {best} | - | - | {_times(ruled['auto'])} | {_ratio(ruled['auto'], own[best])} |"
    ratios = [mean_s(ruled[each]["runs"]) / mean_s(own[each]["runs"]) for each in own if each in ruled]
    if len(ratios) > 1:
        mean = exp(fmean(map(log, ratios)))
        yield from ["", f"Geometric mean of the ratios of mean times: {mean:.2f}; worst {max(ratios):.2f}."]


def finals(case: str, ends: Mapping[str, Sequence[Line]]) -> Iterator[str]:
    """Yield a table of the losses on unseen data after equal samples, by protocol and rule."""
    names = list(ends[BSP][0])
    yield f"## {case}: unseen data after {FINAL_GRADIENTS[case]:,} gradients"
    yield from ["", f"{SEEDS} seeds: {SPREAD}. A difference is that of paired values.", ""]
    yield f"| protocol | {' | '.join(f'{name} | difference to bsp' for name in names)} |"
    yield f"| --- |{' --- | --- |' * len(names)}"
    for protocol, runs in sorted(ends.items(), key=lambda end: end[0] != BSP):
        columns = []
        for name in names:
            values, own = ([run[name] for run in each] for each in (runs, ends[BSP]))
            interval = interval_of_mean([one - two for one, two in zip(values, own, strict=True)])
            assert interval is not None
            margin = interval.high - interval.estimate
            columns += [spread(values, 3), f"{interval.estimate:+.4f} +- {margin:.4f}" if protocol != BSP else "-"]
        yield f"| {protocol} | {' | '.join(columns)} |"


def _times(line: Line) -> str:
    reached = [run["seconds"] for run in line["runs"] if run["seconds"] is not None]
    missed = len(line["runs"]) - len(reached)
    return spread(reached, 1) + (f", {missed} not reached" if missed else "")


def _ratio(line: Line, other: Line) -> str:
    """Return the mean ratio of paired times with its interval, if both reached the target with every seed."""
    pairs = [(one["seconds"], two["seconds"]) for one, two in zip(line["runs"], other["runs"], strict=True)]
    if any(None in pair for pair in pairs):
        return "-"
    ratios = [one / two for one, two in pairs]
    interval = interval_of_mean(ratios)
    return f"{fmean(ratios):.2f}" + (f" +- {interval.high - interval.estimate:.2f}" if interval is not None else "")


if __name__ == "__main__":
    main()
