"""`paceline search-cost`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Format, Output
from paceline.errors import UsageError
from paceline.utils.text_table import TextTable, paragraph
from paceline.utils.wording import counted

if TYPE_CHECKING:
    from paceline.experiments.search_cost.cost import SearchCost
    from paceline.experiments.search_cost.recorded_search import RecordedSearch

_HEAD = (
    "search setting (recurring,\nBSP runs, candidate runs)",
    "cost in \nBSP runs ",
    "amortised over \nrecurrences ",
    "effective \ntraining ",
    "success ",
)


def search_cost(
    runs: Annotated[
        Path, typer.Argument(help="CSV file with the columns setting (0.25) or bsp_percent (25), time_s, accuracy.")
    ],
    settings: Annotated[
        str | None,
        typer.Option(
            help="BSP runs + candidate runs, for example 5+5,1+3; 0+3 is a recurring job. Default: the paper's."
        ),
    ] = None,
    ladder: Annotated[
        str | None, typer.Option(help="Switch points, for example 50%,25%,12.5%. Default: all recorded ones.")
    ] = None,
    stand_in: Annotated[
        list[str] | None,
        typer.Option(help="Substitute, for example 12.5%=10%: use the runs at 10% for 12.5%. Repeatable."),
    ] = None,
    best_alone: Annotated[
        str | None, typer.Option(help="Switch points, for example 50%,12.5%, that use only their most accurate run.")
    ] = None,
    leave_out: Annotated[list[str] | None, typer.Option(help="COLUMN=VALUE,VALUE: rows to skip. Repeatable.")] = None,
    margin: Annotated[float, typer.Option(help="Accepted loss of mean accuracy.")] = 0.01,
    two_sided: Annotated[
        bool, typer.Option("--two-sided", help="Also reject a mean accuracy above the target by more than the margin.")
    ] = False,
    target: Annotated[
        float | None, typer.Option(help="Known accuracy of a recurring job. Default: mean of all BSP runs.")
    ] = None,
    truth: Annotated[
        str | None, typer.Option(help="Correct switch point, for example 6.25%. Default: the result with all runs.")
    ] = None,
    take_all: Annotated[
        bool, typer.Option("--take-all", help="Use all recorded runs where fewer exist than a setting needs.")
    ] = False,
    exact_up_to: Annotated[
        int, typer.Option(help="Most comparisons to enumerate exactly; above it, simulate.")
    ] = 1_000_000,
    draws: Annotated[int, typer.Option(help="Number of simulated searches.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulations.")] = 0,
    output: Output = Format.TEXT,
) -> None:
    """Compute cost and success rate of a switch-point search from recorded runs."""
    from paceline.experiments.search_cost.cost import Counting, SearchSetting, search_costs
    from paceline.experiments.search_cost.recorded_runs import read_recorded_runs
    from paceline.experiments.search_cost.recorded_search import recorded_search

    search = recorded_search(
        read_recorded_runs(runs, _left_out(leave_out or [])),
        ladder=_shares(ladder) if ladder is not None else None,
        stand_ins=dict(map(_stand_in, stand_in or [])),
        best_alone=_shares(best_alone) if best_alone is not None else (),
        margin=margin,
        two_sided=two_sided,
        target=target,
        truth=None if truth is None else _share(truth),
    )
    asked = None if settings is None else [SearchSetting.parse(each) for each in settings.split(",")]
    costs = search_costs(search, asked, Counting(take_all=take_all, exact_up_to=exact_up_to, draws=draws, seed=seed))
    print(_as_json(search, costs) if output is Format.JSON else "\n".join(_as_text(search, costs)))


def _as_text(search: RecordedSearch, costs: Sequence[SearchCost]) -> Iterator[str]:
    from paceline.experiments.search_cost.recorded_runs import percent

    yield from TextTable(_HEAD, [_row(each) for each in costs]).text()
    yield ""
    tried = ", ".join(percent(rung.fraction) for rung in search.ladder)
    fails = "misses the target by more than" if search.two_sided else "is below the target by more than"
    found = search.found
    sentences = (
        f"BSP takes {search.bsp.time_s:.4g} s. Switch points: {tried} of BSP, until one {fails} {search.margin:g}.",
        f"{percent(found.fraction)} is correct and takes {found.time_s:.4g} s.",
        _simulated(costs),
    )
    for sentence in sentences:
        yield paragraph(sentence)


def _row(each: SearchCost) -> list[str]:
    amortised = f"{each.amortised:.2f}" if isfinite(each.amortised) else "never"
    values = (f"{each.cost:.2f}", amortised, f"{each.effective:.2f}", f"{100 * each.success:.1f} %")
    return [str(each.setting), *(f"{value}{'~' if each.draws else ' '}" for value in values)]


def _simulated(costs: Sequence[SearchCost]) -> str:
    simulated = [each for each in costs if each.draws]
    if not simulated:
        return ""
    cost, success = max(each.cost_error for each in simulated), max(each.success_error for each in simulated)
    of = f"{cost:.2g} of the cost and {100 * success:.2g} % of the success"
    searches = counted(simulated[0].draws, "search", "searches")
    return f"~ simulated, {searches}: standard error at most {of}. Other values are exact."


def _as_json(search: RecordedSearch, costs: Sequence[SearchCost]) -> str:
    rungs = [(rung.fraction, rung.time_s, len(rung.accuracies)) for rung in (search.bsp, *search.ladder)]
    result = {
        "truth": search.found.fraction,
        "target": search.known_target,
        "ladder": [dict(zip(("setting", "time_s", "runs"), rung, strict=True)) for rung in rungs],
        "settings": [_plain(each) for each in costs],
    }
    return json.dumps(result, allow_nan=False)


def _plain(each: SearchCost) -> dict[str, Any]:
    return {
        "recurring": each.setting.bsp_runs == 0,
        **{name: value for name, value in vars(each).items() if name != "setting"},
        **vars(each.setting),
        "amortised": each.amortised if isfinite(each.amortised) else None,
        "found": [{"setting": fraction, "probability": p} for fraction, p in each.found.items()],
    }


def _share(text: str) -> float:
    """Parse a share of the workload.

    >>> _share("12.5%"), _share("0.125")
    (0.125, 0.125)
    """
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if number != text.strip() else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{text.strip()!r} is not a share of the workload, for example 25% or 0.25")
    return share


def _shares(text: str) -> list[float]:
    return [_share(each) for each in text.split(",")]


def _stand_in(text: str) -> tuple[float, float]:
    share, equals, other = text.partition("=")
    if not equals:
        raise UsageError(f"--stand-in {text!r}, expected SHARE=SHARE, for example 12.5%=10%")
    return _share(share), _share(other)


def _left_out(texts: Sequence[str]) -> dict[str, list[str]]:
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for text in texts:
        column, equals, values = text.partition("=")
        if not equals:
            raise UsageError(f"--leave-out {text!r}, expected COLUMN=VALUE,VALUE, for example order=ASP,SSP")
        rows[column.strip()] += [value.strip() for value in values.split(",")]
    return rows
