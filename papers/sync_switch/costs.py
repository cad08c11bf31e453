"""Compute Table IV of the Sync-Switch paper from the runs that its authors published.

python -m papers.sync_switch.costs FILE.csv        # writes results/table4.jsonl and results/table4.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.experiments.search_cost.cost import Counting, SearchCost, SearchSetting, search_costs
from paceline.experiments.search_cost.recorded_runs import read_recorded_runs
from paceline.experiments.search_cost.recorded_search import RecordedSearch, recorded_search
from papers.store import Line

RESULTS = Path(__file__).parent / "results"
LADDER = (0.5, 0.25, 0.125, 0.0625, 0.03125)
STAND_INS = {0.125: 0.1, 0.0625: 0.05, 0.03125: 0.02}
BEST_ALONE = (0.5, 0.125)
OTHER_ORDERS = ("ASP", "ASP->BSP")
MISNAMED = "b15-a85-run4"  # listed among the runs at 25 %
QUANTITIES = ("cost", "amortised", "effective", "success")


@dataclass(frozen=True)
class Printed:
    """Printed row of Table IV; the success is a share here."""

    setting: SearchSetting
    cost: float
    amortised: float
    effective: float
    success: float


TABLE_IV = (
    Printed(SearchSetting(5, 5), 12.71, 15.79, 1.97, 1.0),
    Printed(SearchSetting(4, 4), 10.17, 12.63, 1.97, 1.0),
    Printed(SearchSetting(3, 3), 7.62, 9.47, 1.97, 0.992),
    Printed(SearchSetting(2, 2), 5.07, 6.30, 1.97, 0.823),
    Printed(SearchSetting(1, 1), 2.48, 3.08, 2.02, 0.568),
    Printed(SearchSetting(1, 5), 8.71, 10.82, 2.41, 0.804),
    Printed(SearchSetting(1, 4), 7.16, 8.90, 2.37, 0.787),
    Printed(SearchSetting(1, 3), 5.61, 6.97, 2.32, 0.78),
    Printed(SearchSetting(1, 2), 4.06, 5.04, 2.22, 0.694),
    Printed(SearchSetting(0, 5), 7.71, 9.58, 2.59, 1.0),
    Printed(SearchSetting(0, 4), 6.17, 7.67, 2.59, 1.0),
    Printed(SearchSetting(0, 3), 4.63, 5.75, 2.59, 1.0),
    Printed(SearchSetting(0, 2), 3.07, 3.81, 2.61, 0.79),
    Printed(SearchSetting(0, 1), 1.50, 1.86, 2.67, 0.566),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the authors' runs of set-up 1: run, order, bsp_percent, time_s, ...")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(arguments)
    lines = list(compared(args.file))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table4.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (args.out / "table4.md").write_text("\n".join(table(lines)) + "\n")


def authors_search(file: Path, *, with_misnamed: bool = True) -> RecordedSearch:
    """Return the search that the authors probably simulated."""
    left_out = {"order": OTHER_ORDERS, **({} if with_misnamed else {"run": [MISNAMED]})}
    return recorded_search(read_recorded_runs(file, left_out), LADDER, STAND_INS, BEST_ALONE)


def table_iv(search: RecordedSearch) -> list[SearchCost]:
    """Return all rows of the table, by enumerating all draws."""
    return search_costs(search, [row.setting for row in TABLE_IV], Counting(take_all=True))


def compared(file: Path) -> Iterator[Line]:
    """Yield one line per row: theirs, ours, and ours without the run named after another setting."""
    ours = table_iv(authors_search(file))
    without = table_iv(authors_search(file, with_misnamed=False))
    for printed, one, other in zip(TABLE_IV, ours, without, strict=True):
        yield {
            "setting": str(printed.setting),
            "theirs": _numbers(printed),
            "ours": _numbers(one),
            "without_misnamed": _numbers(other),
            "simulated_draws": one.draws,
        }


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the comparison as a Markdown table: theirs / ours / ours without that run."""
    yield "| setting | cost | amortised | effective | success, % |"
    yield "| --- | --- | --- | --- | --- |"
    for line in lines:
        columns = [line[which] for which in ("theirs", "ours", "without_misnamed")]
        cells = [" / ".join(f"{column[name]:.2f}" for column in columns) for name in QUANTITIES[:-1]]
        cells.append(" / ".join(f"{100 * column['success']:.1f}" for column in columns))
        yield f"| {line['setting']} | {' | '.join(cells)} |"
    yield ""
    for which in ("ours", "without_misnamed"):
        worst = {name: max(off(line, which, name) for line in lines) for name in QUANTITIES}
        relative = ", ".join(f"{name} {100 * worst[name]:.2f} %" for name in QUANTITIES[:-1])
        yield f"- {which}, furthest off: {relative}, success {100 * worst['success']:.1f} percentage points"


def off(line: Line, which: str, name: str) -> float:
    """Return the difference to a printed number: relative, or for the success a difference of shares."""
    theirs, ours = float(line["theirs"][name]), float(line[which][name])
    return abs(ours - theirs) / (1 if name == "success" else theirs)


def _numbers(row: Printed | SearchCost) -> Line:
    return {name: round(getattr(row, name), 5) for name in QUANTITIES}


if __name__ == "__main__":
    main()
