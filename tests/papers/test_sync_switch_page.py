"""The page of Sync-Switch: its numbers are those of the stored results."""

from functools import cache
from math import isnan
from statistics import fmean

import pytest

from page_numbers import at_most, check_page, check_tables, span
from papers.series import series_of
from papers.store import Store
from papers.sync_switch.costs import QUANTITIES, TABLE_IV, off
from papers.sync_switch.predicted import Workers, mean_played_s
from papers.sync_switch.run import store
from papers.sync_switch.settings import (
    AWARE,
    FIGURES,
    MEASURED,
    ONE,
    PLAN,
    RATES,
    RESULTS,
    SETUPS,
    SMALL,
    TWO,
    slowed,
    switch,
)
from papers.sync_switch.table import MARGIN, predicted, speed_ups, tables, time_to
from papers.sync_switch.training import lines_of

GREEDY, ELASTIC = AWARE
GIVEN = [
    "Li, Mangoubi, Xu, Guo...",
    "`data/` holds `mnist/`...",
    "**The small version.**...",
    "**Choice of settings.**...",  # of seed 100, which is in no result
    "12 to 14: set-ups 2 and 3",
    "2: ResNet-32",
    "for a GPU | 0 |",
    'configured (`--only "set-up 2"`), not run | 0 |',
    *("set-up 1", "Set-up 1", "set-ups 1 to 3", "n = 16", "an update has 16 times that rate", "200 times"),
    *("0.5 + 0.5 Exp(1)", "0.083 s + 1.16e-3 s", "BSP for 25 %", "BSP for three seeds", "first 6.25 %", "At 50 %"),
    *("At eta = 0.0125 the plan with 25 % lost 0.04 (seed 100)", "The paper observed its 2 %", "(bar 1 %)"),
    "(set-up 3)",
    "set-ups 2 and 3",
    'In "mild", one worker has half speed...',
    "The rates are doublings, and 0.035 between...",
    'The column "at the paper\'s speeds" is (share of BSP) x...',
    "The stragglers differ too. In the paper, two workers...",
    "- Fig. 8a: the text...",
    "- Accuracy: the paper's has converged...",
    "- Fig. 11, time to accuracy...",
    "- Set-ups 1 to 3 have...",
    "**How the numbers were matched.**...",
    "| draws from all runs...",  # readings of Table IV, from the authors' runs, which are not in this repository
    "| the best one alone...",
    "| 6.25 % is represented...",
    "| 12.5 % is represented...",
    "| 3.125 % is represented...",
    "| two-sided...",
    "| cost of the path...",
    "| effective counts...",
    "| cost of only...",
    "So the cost is a mean over all paths...",
    "One run explains...",
    "**Tables V and VI**...",
    "`FILE.csv` holds the authors'...",
]


@cache
def panel(figure, name):
    case = FIGURES[figure].cases[name]
    return series_of(lines_of(case.setup, case.series, store(figure, RESULTS).lines()))


def accuracy(figure, name, series):
    return fmean(line["accuracy"] for line in panel(figure, name)[series].values())


def time_s(figure, name, series):
    return fmean(line["time_s"] for line in panel(figure, name)[series].values())


def faster(figure, name, series, reference):
    """Return how many times faster a series is than another one, by seed."""
    runs, others = panel(figure, name)[series], panel(figure, name)[reference]
    return [1 / (line["time_s"] / others[seed]["time_s"]) for seed, line in runs.items() if seed in others]


def with_span(values, digits):
    return f"{fmean(values):.{digits}f} ({span(values, digits)})"


def of_the_figures():
    """Yield the numbers of the table of figures."""
    order = panel("5", "small, order")
    first, last = order[switch(50)], order["asp@50% >> bsp"]
    assert all(first[seed]["accuracy"] > last[seed]["accuracy"] for seed in first)
    names = (switch(50), "asp@50% >> bsp", "bsp", "asp")
    yield "half of each, BSP first {:.4f}, ASP first {:.4f}; BSP alone {:.4f}, ASP alone {:.4f} | 5 |".format(
        *(accuracy("5", "small, order", name) for name in names)
    )
    shares = panel("5", "small, share")
    listed = ", ".join(f"{accuracy('5', 'small, share', name):.4f}" for name in shares)
    yield f"{listed} with 0, 3.125, 6.25, 12.5, 25, 50, 100 % | {len(shares['bsp'])} |"
    sizes = panel("8", "small, batch size")
    slow, *_, fast = (time_s("8", "small, batch size", name) for name in sizes)
    accuracies = ", ".join(f"{accuracy('8', 'small, batch size', name):.3f}" for name in sizes)
    yield f"differ by {slow / fast:.1f} times from 16 to 128 per worker"
    yield f"learn less: {accuracies} | 3 |"
    rules = panel("8", "small, momentum")
    lost = [
        rules[PLAN][seed]["accuracy"] - line["accuracy"]
        for name, runs in rules.items()
        if name != PLAN
        for seed, line in runs.items()
    ]
    assert min(lost) > 0
    yield f"each other rule loses {span(lost, 3)} | 3 |"
    eight, sixteen = "small, n=8", "small, n=16"
    time = time_s("10", eight, "bsp") / time_s("10", eight, PLAN)
    less = accuracy("10", eight, "bsp") - accuracy("10", eight, PLAN)
    more = accuracy("10", eight, PLAN) - accuracy("10", eight, "asp")
    yield f"n = 8, 25 %: {time:.2f} times faster, {less:.3f} less accurate than BSP, {more:.3f} more than ASP"
    assert abs(accuracy("10", sixteen, "bsp") - accuracy("10", sixteen, switch(50))) < 0.001
    time = time_s("10", sixteen, "bsp") / time_s("10", sixteen, switch(50))
    yield f"n = 16, 50 %: {time:.2f} times faster, equally accurate; ASP diverges, as in the paper | 5 |"
    times_s = {}
    target = accuracy("11", "small", "bsp") - MARGIN
    for name, runs in panel("11", "small").items():
        reached = [time_to(line, target) for line in runs.values()]
        if not any(map(isnan, reached)):
            times_s[name] = fmean(reached)
    assert list(times_s) == [*map(switch, (6.25, 12.5, 25, 50)), "bsp"]
    bsp_s = times_s.pop("bsp")
    low, high = (round(value, -1) for value in (min(times_s.values()), max(times_s.values())))
    yield f"with 6.25 to 50 % need {low:.0f} to {high:.0f} s to within {MARGIN:g} of BSP's accuracy"
    yield f"BSP needs {round(bsp_s, -1):.0f} s"
    share = bsp_s / time_s("11", "small", "bsp")
    yield f"it is there after {100 * share:.0f} % of its time, before the rate falls | 5 |"
    mild, moderate = "small, mild", "small, moderate"
    slower = 100 * (1 / fmean(faster("15", mild, GREEDY, PLAN)) - 1)
    lost, less = (accuracy("15", mild, PLAN) - accuracy("15", mild, policy) for policy in AWARE)
    yield f"greedy {slower:.0f} % slower and {lost:.3f} less accurate"
    yield f"elastic equally fast and {less:.3f} less accurate | 3 |"
    elastic, greedy = (faster("15", moderate, policy, PLAN) for policy in (ELASTIC, GREEDY))
    yield f"elastic {fmean(elastic):.2f} times faster ({span(elastic, 2)}), equally accurate"
    lost = accuracy("15", moderate, PLAN) - accuracy("15", moderate, GREEDY)
    yield f"greedy {fmean(greedy):.2f} times, {lost:.3f} less | 5 |"


def of_the_requirements():
    """Yield the numbers of the small version's requirements, and of the predictions."""
    one, case = panel("straggler", "small"), FIGURES["straggler"].cases["small"]
    known_s = mean_played_s(Workers.of(case.setup.cluster), 8000, 0.25)
    off_each = max(abs(line["time_s"] / known_s - 1) for line in one[PLAN].values())
    mean_s = time_s("straggler", "small", PLAN)
    yield (
        f"{mean_s:.0f} s against {known_s:.0f}: {100 * abs(mean_s / known_s - 1):.1f} % off, each seed within "
        f"{at_most(100 * off_each, 1)} %"
    )
    yield with_span([1 / each for each in faster("straggler", "small", PLAN, "bsp")], 3)
    yield with_span([line["accuracy"] for line in one[PLAN].values()], 4)
    assert f"{accuracy('straggler', 'small', 'bsp'):.4f}" == "0.9713"  # the bar's
    gain = with_span(faster("15", "small, moderate", ELASTIC, PLAN), 3)
    yield "{}; {:.4f} against {:.4f}".format(
        gain, *(accuracy("15", "small, moderate", name) for name in (ELASTIC, PLAN))
    )
    yield with_span([1 / each for each in faster("15", "small, none", ELASTIC, PLAN)], 3)
    ends = [accuracy("sixteen", "small", name) for name in ("bsp", "asp", switch(50))]
    yield "BSP {:.3f}, ASP {:.3f}, BSP 50 % then ASP {:.3f} (5 seeds)".format(*ends)
    plain, slow = Workers.of(SMALL.cluster), Workers.of(slowed(SMALL, *ONE).cluster)
    yield f"an update of BSP takes 0.5 + 0.5 H_8 = {plain.bsp_update_s():.3f} s"
    while_slow_s = slow._slow_update_s(5)
    yield f"that holds for four fifths of the time, and E[max(5 X_1, X_2 ... X_8)] = {while_slow_s:.1f} s for the rest"
    yield f"{slow.bsp_update_s():.2f} s on average"
    yield f"workers deliver {1 / (slow.asp_s(1001) - slow.asp_s(1000)):.2f} gradients per second"
    apart = [
        abs(w.plan_s(8000, share) / mean_played_s(w, 8000, share) - 1) for w in (plain, slow) for share in (0, 0.25, 1)
    ]
    yield f"agrees to within {at_most(100 * max(apart), 1)} %"
    wrong = []
    for figure, about in FIGURES.items():
        for name, case in about.cases.items():
            for series, runs in panel(figure, name).items():
                text = predicted(series.partition(", lr=")[0], case)
                if text.isdigit():
                    wrong.append(abs(fmean(line["time_s"] for line in runs.values()) / float(text) - 1))
    yield f"within {at_most(100 * max(wrong), 1)} % of the mean of the runs"


def of_the_rates():
    """Yield the numbers of the search for the largest rate at n = 16."""
    cells = []
    for lr in RATES:
        values = [line["accuracy"] for line in panel("rates", "small")[f"bsp, lr={lr:g}"].values()]
        digits = 3 if lr <= 0.025 else 2
        cells.append(with_span(values, digits) if lr in (0.025, 0.035) else f"{fmean(values):.{digits}f}")
    yield f"| eta | {' | '.join(f'{lr:g}' for lr in RATES)} |"
    yield f"| accuracy | {' | '.join(cells)} |"
    best, edge = accuracy("rates", "small", "bsp, lr=0.0125"), accuracy("rates", "small", "bsp, lr=0.025")
    yield f"At 0.025 the accuracy is {best - edge:.2f} below the best one"
    diverged = accuracy("sixteen", "small", switch(25))
    yield f"which diverges before the rate falls: {diverged:.2f}. With 50 %, the paper's share for 16 workers"


def of_the_speed_ups():
    """Yield the numbers of "Why the speed-ups differ"."""
    times = time_s("5", "small, order", "bsp") / time_s("5", "small, order", "asp")
    yield f"an update of BSP takes {Workers.of(SMALL.cluster).bsp_update_s():.2f} times a round trip"
    yield f"no plan can be more than {times:.2f} times as fast as BSP"
    slower = [
        measured.bsp_s / setup.cluster.n / measured.asp_s
        for measured, (setup, _) in zip(MEASURED.values(), SETUPS.values(), strict=True)
    ]
    yield f"BSP took {slower[0]:.1f} times (set-up 1) and {slower[2]:.1f} times (set-up 3)"
    yield f"for {slower[0]:.1f} and {slower[2]:.1f} times from the paper's logs, and {times:.2f} times here | 0 |"
    jobs = ("1: ResNet-32, CIFAR-10, n = 8", "2: ResNet-50, CIFAR-100, n = 8", "3: ResNet-32, CIFAR-10, n = 16")
    worst = []
    for name, row in zip(jobs, list(speed_ups())[2:], strict=True):
        _, _, plan, theirs, ours, barrier, _ = (cell.strip() for cell in row.split("|"))
        yield f"| {name} | {plan} | {theirs} | {ours} | {barrier} |"
        worst.append(abs(float(ours) / float(theirs) - 1))
    yield f"It explains Table I to {100 * max(worst):.0f} %"


def of_the_conclusions():
    """Yield the numbers of the conclusions."""
    lost = accuracy("5", "small, order", "bsp") - accuracy("5", "small, order", "asp")
    yield f"ASP at the same rate loses {lost:.3f} at n = 8 and everything at n = 16"
    falls = []
    for percent in (3.125, 6.25, 12.5, 25):
        for line in panel("11", "small")[switch(percent)].values():
            switched = line["decisions"][1][1]
            curve = list(zip(line["test_workload"], line["test_accuracy"], strict=True))
            before = next(value for at, value in curve if at >= switched)
            falls.append(before - min(value for at, value in curve if switched < at <= switched + 500))
    yield f"accuracy falls by {span(falls, 2)} for some hundred gradients"
    less = accuracy("10", "small, n=8", "bsp") - accuracy("10", "small, n=8", PLAN)
    yield f"with 0.00625 it loses {less:.3f}"
    none = "small, none"
    switches = [
        sum(kind == "protocol" for _, _, kind, _ in line["decisions"]) // 2
        for line in panel("15", none)[GREEDY].values()
    ]
    yield f"Greedy switches to ASP {min(switches)} to {max(switches)} times in the phase"
    costs = 100 * fmean(1 / each - 1 for each in faster("15", none, ELASTIC, PLAN))
    yield f"Elastic excludes it for some seconds, which costs {costs:.1f} %"
    yield f"this costs {accuracy('15', none, PLAN) - accuracy('15', none, GREEDY):.3f} of accuracy"
    ideal_s = Workers.of(slowed(SMALL, *TWO).cluster).ideal_s(8000, 0.25)
    yield "{:,.0f} s (`Workers.ideal_s`). Elastic takes {:,.0f} s, and no policy {:,.0f} s".format(
        ideal_s, *(time_s("15", "small, moderate", name) for name in (ELASTIC, PLAN))
    )


def of_table_iv():
    """Yield the numbers of the cost of the search."""
    lines = Store(RESULTS / "table4.jsonl").lines()
    for line in lines:
        cells = [f"{line['theirs'][name]:.2f} / {line['ours'][name]:.2f}" for name in QUANTITIES[:-1]]
        success = f"{100 * line['theirs']['success']:.1f} / {100 * line['ours']['success']:.1f}"
        yield f"| {line['setting']} | {' | '.join([*cells, success])} |"
    worst = [100 * max(off(line, "ours", name) for line in lines) for name in QUANTITIES]
    furthest = max(lines, key=lambda line: off(line, "ours", "success"))["setting"]
    yield "Cost, amortised and effective are at most {:.2f}, {:.2f} and {:.2f} % off".format(*worst[:3])
    yield f"success is at most {worst[3]:.1f} percentage points off (bar 2), at {furthest}"
    errors = [
        100 * (row.success * (1 - row.success) / 1000) ** 0.5
        for row in TABLE_IV
        if str(row.setting) in (furthest, "(No, 1, 1)")
    ]
    yield f"The standard error of 1,000 simulations is {errors[1]:.1f} points there and {errors[0]:.1f} at (No, 1, 1)"
    yield f"| **chosen reading** | **{worst[0]:.1f} %** | **{worst[3]:.1f}** |"


@pytest.mark.slow
def test_the_page_has_the_numbers_of_the_stored_results():
    parts = (of_the_figures, of_the_requirements, of_the_rates, of_the_speed_ups, of_the_conclusions, of_table_iv)
    check_page(RESULTS.parent / "README.md", [text for part in parts for text in part()], GIVEN)


@pytest.mark.slow
def test_the_tables_are_those_of_the_stored_results():
    check_tables(tables, RESULTS)
