"""Write the tables into the README and into the pages of docs/evidence: `python -m papers.ddp.table`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean, geometric_mean

from paceline.utils.confidence_intervals import Interval
from paceline.utils.wording import counted
from papers.ddp import real
from papers.ddp.goals import goals
from papers.ddp.outcomes import Outcome, Outcomes, all_lines, interval_text, loss_difference, shown, speed_up, unreached
from papers.ddp.patterns import PATTERNS
from papers.ddp.settings import AUTO, DDP, JOBS, RESULTS, SHOWN, WITHOUT_SLOW, Comparison
from papers.store import Line, Store

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = ROOT / "docs" / "evidence"

HEAD = (
    "contender",
    "final loss - DDP's",
    "seconds for equal samples",
    "seconds to the target",
    "times faster than DDP",
    "... than DDP without the slow worker",
    "rank-seconds / DDP's",
    "slow worker's share",
)


def main(results: Path = RESULTS, pages: Path = PAGES, first_page: Path = README) -> None:
    lines = all_lines(results)
    first_page.write_text(with_tables(first_page.read_text(), summary(lines)))
    for pattern in PATTERNS:
        page = pages / f"{pattern}.md"
        page.write_text(with_tables(page.read_text(), tables(pattern, lines)))
    index = pages / "index.md"
    checked = Store(results / "real.jsonl").lines()
    index.write_text(with_tables(index.read_text(), [*overview(lines), *check(checked)]))


def with_tables(page: str, rows: Iterable[str]) -> str:
    """Return the text of a page with other lines between its two comments."""
    before, begin, rest = page.partition("<!-- results -->\n")
    _, end, after = rest.partition("<!-- end of results -->")
    return "".join([before, begin, *(f"{line}\n" for line in rows), end, after])


def overview(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a figure and a table of `auto` against DDP, with and without the slow worker, a row for each comparison."""
    found = shown(lines, (DDP, WITHOUT_SLOW, AUTO))
    if not found:
        return
    yield from [
        "",
        "![Times faster than DDP](../../papers/ddp/figures/overview.svg)",
        "",
    ]
    yield "| pattern | job | times faster than DDP | ... than DDP without the slow worker | final loss - DDP's |"
    yield "| --- | --- | --- | --- | --- |"
    for comparison, runs in found.items():
        faster = [speed_up(runs[AUTO], runs[name]) for name in (DDP, WITHOUT_SLOW)]
        columns = [interval_text(each, ".2f") if each else unreached(runs[AUTO]) for each in faster]
        loss = _shown(loss_difference(runs[AUTO], runs[DDP]), "+.3f")
        link = f"[{comparison.pattern}]({comparison.pattern}.md)"
        yield f"| {link} | {_title(comparison, runs)} | {' | '.join(columns)} | {loss} |"
    yield from ["", "The goals for `auto`, each with the comparison that is farthest from it:", ""]
    yield "| goal | measured | reached |"
    yield "| --- | --- | --- |"
    for goal in goals(found):
        yield f"| {goal.text} | {goal.measured} | {'yes' if goal.is_reached else '**no**'} |"
    yield ""


def check(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a table of the times of real processes and of the simulator, a row for each pattern and contender."""
    times: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for (pattern, contender, _), each in real.compared(lines).items():
        times[pattern, contender].append((each.real.run, each.simulated.run))
    if not times:
        return
    yield f"{real.TITLE}: seconds for the same samples, divided by those of DDP."
    yield ""
    yield "| pattern | contender | seeds | real processes | simulated | difference |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for (pattern, contender), pairs in times.items():
        ours, simulated = (geometric_mean(column) for column in zip(*pairs, strict=True))
        columns = f"{len(pairs)} | {ours:.3f} | {simulated:.3f} | {100 * (ours / simulated - 1):+.1f} %"
        yield f"| {pattern} | {contender} | {columns} |"
    yield ""


def summary(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the figure and a sentence with four numbers: how many times faster than DDP `auto` is."""
    found = {each.pattern: runs for each, runs in shown(lines, (DDP, AUTO)).items() if (each.job, each.n) == SHOWN}
    if not found:
        return
    faster = {pattern: speed_up(runs[AUTO], runs[DDP]) for pattern, runs in found.items()}
    times = {pattern: f"**{each.estimate:.1f} times**" for pattern, each in faster.items() if each}
    often, turns, ladder, none = (times.get(each, "-") for each in ("transient", "rotating", "ladder", "none"))
    seeds = min(len(runs[AUTO]) for runs in found.values())
    yield "![Times faster than DDP](papers/ddp/figures/overview.svg)"
    yield ""
    yield "Given DDP's learning rate, `auto` reaches DDP's loss"
    yield f"{often} faster where 5 % of the gradients are slow. Where each worker in turn is slow, it is {turns}"
    yield f"faster; with speeds from 1 to 1/3, {ladder}. Where no worker is slow, it is {none} as fast."
    yield f"These are simulated clusters, a CNN on MNIST and {seeds} paired seeds"
    yield "([intervals, all patterns, and where it does not pay](docs/evidence/index.md))."


def tables(pattern: str, lines: Sequence[Line]) -> Iterator[str]:
    """Yield the figure and the tables of a pattern, one for each comparison with results of two seeds or more."""
    found = shown(lines, pattern=pattern)
    if not found:
        return
    yield from ["", f"![Speed and final loss of each contender](../../papers/ddp/figures/{pattern}.svg)"]
    for comparison, runs in found.items():
        yield from ["", f"## {_title(comparison, runs)}", "", *table(runs)]
    yield ""


def _title(comparison: Comparison, runs: Outcomes) -> str:
    return f"{JOBS[comparison.job].title}, {comparison.n} workers, {len(runs[AUTO])} seeds"


def table(found: Outcomes) -> Iterator[str]:
    """Yield the table of a comparison, a row for each contender that has runs."""
    yield f"| {' | '.join(HEAD)} |"
    yield f"| {' | '.join('---' for _ in HEAD)} |"
    for name, runs in found.items():
        if runs:
            fewer = f" ({counted(len(runs), 'seed')})" if len(runs) < len(found[DDP]) else ""
            yield f"| {' | '.join([name + fewer, *_row(name, found)])} |"


def _row(name: str, found: Outcomes) -> Iterator[str]:
    runs, ddp, without = found[name], found[DDP], found[WITHOUT_SLOW]
    pairs = [(runs[seed], ddp[seed]) for seed in runs]
    yield "-" if name == DDP else _shown(loss_difference(runs, ddp), "+.3f")
    yield f"{fmean(run.run_s for run in runs.values()):.1f}"
    yield _seconds(runs)
    yield "-" if name == DDP else _shown(speed_up(runs, ddp), ".2f")
    yield "-" if name == WITHOUT_SLOW else _shown(speed_up(runs, without), ".2f")
    reached = [(our, their) for our, their in pairs if isfinite(our.target_s)]
    ratios = [our.ranks * our.target_s / (their.ranks * their.target_s) for our, their in reached]
    yield f"{fmean(ratios):.2f}" if len(ratios) == len(pairs) else "-"
    yield f"{100 * fmean(run.slow_share for run in runs.values()):.1f} %"


def _seconds(runs: Mapping[int, Outcome]) -> str:
    reached = [run.target_s for run in runs.values() if isfinite(run.target_s)]
    shown = f"{fmean(reached):.1f}" if reached else ""
    return f"{shown} ({unreached(runs)})".strip() if len(reached) < len(runs) else shown


def _shown(interval: Interval | None, digits: str) -> str:
    return "-" if interval is None else interval_text(interval, digits)


if __name__ == "__main__":
    main()
