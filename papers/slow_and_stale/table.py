"""Write results/tables.md: runtimes in simulation and theory, and all series at some times with their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isnan, log, nan
from pathlib import Path
from statistics import mean

import numpy as np

from papers.series import SPREAD, Runs, series_of, spread
from papers.slow_and_stale.run import store
from papers.slow_and_stale.settings import FIGURES, RESULTS, TIMES, Figure
from papers.slow_and_stale.training import lines_of
from papers.store import Line

# Seconds, or updates, at which the curves of a figure are compared.
AT: Mapping[str, Sequence[float]] = {
    "8": (100, 200, 400, 600, 800, 1000, 1200, 1400),
    "9": (0.2, 0.5, 1, 2, 3, 3.8),
    "10": (100, 200, 400, 800, 1400),
    "11": (100, 200, 400, 600),
    "12": (100, 200, 400, 800, 1600, 2400),
    "13": (100, 200),
    "14": (200, 400, 800, 1600, 1900),
}
LAST = 0.2  # last share of a run, whose mean estimates its limit


def main(folder: Path = RESULTS) -> None:
    (folder / "tables.md").write_text("\n".join(tables(folder)) + "\n")


def tables(folder: Path) -> Iterator[str]:
    """Yield the lines of a page with one table per panel."""
    for name, times in TIMES.items():
        lines = store(name, folder).lines()
        for law in times.laws:
            if by_series := series_of([line for line in lines if line["asked"]["law"] == law]):
                yield from [f"## Figure {name}, {law}: {times.says}", "", *runtimes(by_series), ""]
    for line in store("7", folder).lines():
        best = "; ".join(f"{protocol} from {at_s:.0f} s" for at_s, protocol in line["best"])
        yield from ["## Figure 7", "", f"The smallest bound: {best}.", ""]
    for name, figure in FIGURES.items():
        for panel, case in figure.cases.items():
            if lines := lines_of(case, store(name, folder).lines()):
                title = f"## Figure {name}, {panel}: {figure.says}"
                yield from [title, "", f"{SPREAD}.", "", *curves(series_of(lines), figure, AT[name]), ""]


def runtimes(by_series: Mapping[str, Runs]) -> Iterator[str]:
    """Yield one row per P or K: seconds per update in simulation and theory; for Fig. 5 also log(speed-up)."""
    asked = next(iter(next(iter(by_series.values())).values()))["asked"]
    over, name = ("workers", "P") if len(asked["workers"]) > 1 else ("k", "K")
    columns = [name, *by_series, *(["log of the speed-up"] if "sync" in by_series else [])]
    yield f"| {' | '.join(columns)} |"
    yield "|" + " --- |" * len(columns)
    for i, value in enumerate(asked[over]):
        cells = [_runtime(list(runs.values()), i) for runs in by_series.values()]
        if "sync" in by_series:
            cells.append(_speed_up(by_series, i))
        yield f"| {value} | {' | '.join(cells)} |"


def _runtime(lines: Sequence[Line], i: int) -> str:
    simulated = mean(line["simulated_s"][i] for line in lines)
    line = lines[0]
    if line["kind"][i] == "upper bound":
        return f"{simulated:.4f} (theory: {line['lower_s'][i]:.4f} to {line['upper_s'][i]:.4f})"
    return f"{simulated:.4f} (theory {line['theory_s'][i]:.4f})"


def _speed_up(by_series: Mapping[str, Runs], i: int) -> str:
    simulated, theory = (
        log(mean(line[which][i] for line in by_series["sync"].values()))
        - log(mean(line[which][i] for line in by_series["async"].values()))
        for which in ("simulated_s", "theory_s")
    )
    return f"{simulated:.3f} (theory {theory:.3f})"


def curves(by_series: Mapping[str, Runs], figure: Figure, at: Sequence[float]) -> Iterator[str]:
    """Yield one row per series, and the order of all at each point."""
    unit = "s" if figure.against == "seconds" else "updates"
    columns = [figure.shows, "seeds", *(f"{x:g} {unit}" for x in at), "last fifth", "worst of the second half"]
    yield f"| {' | '.join(columns)} |"
    yield "|" + " --- |" * len(columns)
    for name, runs in by_series.items():
        points = [_spread([around(line, x, figure) for line in runs.values()]) for x in at]
        points.append(_spread([tends_to(line, figure) for line in runs.values()]))
        points.append(_spread([worst(line, figure) for line in runs.values()]))
        yield f"| {name} | {len(runs)} | {' | '.join(points)} |"
    yield ""
    for x in at:
        yield f"- {x:g} {unit}: {order(by_series, x, figure)}"


def around(line: Line, x: float, figure: Figure) -> float:
    """Return the mean of the values within 10 % of a time or a number of updates; nan without values."""
    where = np.array(line["probe_s" if figure.against == "seconds" else "probe_version"])
    found = np.array(line[f"probe_{figure.shows}"])[np.abs(where - x) <= x / 10]
    return float(found.mean()) if len(found) else nan


def tends_to(line: Line, figure: Figure) -> float:
    """Return the mean over the last fifth of a run."""
    values = line[f"probe_{figure.shows}"]
    return float(mean(values[-max(1, round(len(values) * LAST)) :]))


def worst(line: Line, figure: Figure) -> float:
    """Return the worst value of the second half of a run: its result if it ended at a bad moment."""
    values = line[f"probe_{figure.shows}"]
    return float((max if figure.shows == "loss" else min)(values[len(values) // 2 :]))


def order(by_series: Mapping[str, Runs], x: float, figure: Figure) -> str:
    """Return the series from best to worst, with "~" between neighbours on whose order the seeds disagree."""
    sign, surely = (1, "<") if figure.shows == "loss" else (-1, ">")
    values = {
        name: {seed: sign * around(line, x, figure) for seed, line in runs.items()} for name, runs in by_series.items()
    }
    known = {name: each for name, each in values.items() if not any(isnan(value) for value in each.values())}
    names = sorted(known, key=lambda name: mean(known[name].values()))
    text = names[0] if names else ""
    for better, worse in pairwise(names):
        agree = all(known[better][seed] < known[worse][seed] for seed in known[better].keys() & known[worse].keys())
        text += f" {surely if agree else '~'} {worse}"
    return text


def _spread(values: Sequence[float]) -> str:
    if any(isnan(value) for value in values):
        return "-"
    return spread(values, 3 if max(values) < 1000 else 0)


if __name__ == "__main__":
    main()
