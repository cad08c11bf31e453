"""The page of "Slow and Stale Gradients": its numbers are those of the stored results."""

from functools import cache
from math import log
from statistics import mean

import numpy as np

from page_numbers import at_most, check_page, check_tables, span
from papers.series import series_of
from papers.slow_and_stale.run import store
from papers.slow_and_stale.settings import FIGURES, RESULTS
from papers.slow_and_stale.table import around, order, tables, tends_to, worst
from papers.slow_and_stale.training import lines_of

LAWS = ("exp(1)", "1 + exp(1)", "Pareto(2, 1)")
STALENESS = "asp + staleness_lr(C=5e-05)"
GIVEN = [
    "Dutta, Joshi, Ghosh, Dube, Nagpurkar...",
    "`data/` holds `mnist/`...",
    "**Set-up.**...",
    "**Units and data.**...",
    "- Fig. 6, 11, 12: P = 8...",
    "log of sync / async, P to 64",
    *("exp(1)", "ln 10", "K = 1", "Pareto(2, 1)", "P = 64", "At P = 8", "K = 7", "2,000 iterations"),
    *("40 workers", "a rate of 0.01", "eta = 0.05", "ASP with 0.005 or 0.0025", "4 gradients per update"),
    *("0 to 1 |", "| 0 to 255 |", "With 0 to 255", "the paper used 0 to 1", "mean 0, variance 1"),
    *("AdaSync (Dutta, Wang, Joshi 2020)", "the paper's K = 4", "the next K", "best at K = 4"),
    *("From 1 s (0.005) or 2 s (0.0025) on", "until 0.5 s", "K = 6 and 7", "(measured every 25 s)", "up to 600 s"),
    *("at every seed | 3 |", "**slower than K-sync** for K = 6 and 7 | 3 |", "after 400 and 600 updates"),
    "8 < 6 < 4 < 2 < 1",
]


@cache
def law(figure, name):
    return series_of([line for line in store(figure, RESULTS).lines() if line["asked"]["law"] == name])


@cache
def panel(figure, name):
    return series_of(lines_of(FIGURES[figure].cases[name], store(figure, RESULTS).lines()))


def simulated_s(figure, of_law, series, i):
    return mean(line["simulated_s"][i] for line in law(figure, of_law)[series].values())


def each(figure, name, series, value):
    return [value(line, FIGURES[figure]) for line in panel(figure, name)[series].values()]


def end(figure, name, series):
    return mean(each(figure, name, series, tends_to))


def at(figure, name, series, x):
    return mean(each(figure, name, series, lambda line, about: around(line, x, about)))


def first_s(line, loss):
    return next(s for s, value in zip(line["probe_s"], line["probe_loss"], strict=True) if value <= loss)


def per_s(series):
    return mean(line["updates"] / line["time_s"] for line in panel("8", "exp(1)")[series].values())


def of_theory():
    """Yield the numbers of Fig. 5 to 7, and of the conclusion on heavy tails."""
    logs, errors = {}, []
    for name in LAWS:
        first = law("5", name)
        for i, workers in enumerate(first["sync"][0]["asked"]["workers"]):
            simulated = log(simulated_s("5", name, "sync", i) / simulated_s("5", name, "async", i))
            theory = log(first["sync"][0]["theory_s"][i] / first["async"][0]["theory_s"][i])
            errors.append(abs(simulated - theory))
            logs[name, workers] = simulated
    yield f"simulation within {at_most(max(errors), 2)} of Theorem 1"
    yield "{:.2f} for exp(1), {:.2f} for 1 + exp(1), {:.2f} for Pareto".format(*(logs[name, 8] for name in LAWS))
    short, seeds = 1 - 8 * log(8) * np.exp(-logs["exp(1)", 8]), len(law("5", "exp(1)")["sync"])
    yield f"log(P log P) is {log(8 * log(8)):.2f} there: {100 * short:.0f} % too low a ratio | {seeds} |"
    seconds = [2000 * simulated_s("6", name, series, 6) for name in LAWS[1:] for series in ("K-batch-async", "K-async")]
    yield "{:,.0f} s and {:,.0f} s for 1 + exp(1), {:,.0f} and {:,.0f} s for Pareto".format(*seconds)
    apart = []
    for name in LAWS[1:]:
        for runs in law("6", name).values():
            for i, kind in enumerate(runs[0]["kind"]):
                simulated = mean(line["simulated_s"][i] for line in runs.values())
                if kind == "upper bound":
                    assert runs[0]["lower_s"][i] <= simulated <= runs[0]["upper_s"][i]
                else:
                    apart.append(abs(simulated / runs[0]["theory_s"][i] - 1))
    yield f"within {at_most(100 * max(apart), 1)} % of theory"
    pareto = law("6", "Pareto(2, 1)")
    slower = [
        i + 1
        for i in range(8)
        if all(
            pareto["K-async"][seed]["simulated_s"][i] > pareto["K-sync"][seed]["simulated_s"][i] for seed in (0, 1, 2)
        )
    ]
    assert slower == [6, 7]
    times = [simulated_s("6", "Pareto(2, 1)", series, i) for i in (5, 6) for series in ("K-sync", "K-async")]
    yield "({:.2f} s against {:.2f} s, {:.2f} s against {:.2f} s)".format(*times)
    low = 1 - simulated_s("5", "Pareto(2, 1)", "sync", -1) / law("5", "Pareto(2, 1)")["sync"][0]["theory_s"][-1]
    yield f"was {100 * low:.0f} % below its expectation"
    (line,) = store("7", RESULTS).lines()
    (_, _), (second_s, _), (third_s, _) = line["best"]
    yield f"async is best until {second_s:.0f} s, K-batch-async until {third_s:.0f} s"


def of_mnist():
    """Yield the numbers of Fig. 8, 10, 11 and 12."""
    eight = panel("8", "exp(1)")
    for x in (100, 200, 400, 600):
        assert [{name[:7] for name in group.split(" ~ ")} for group in order(eight, x, FIGURES["8"]).split(" < ")] in (
            [{"asp"}, {"k_batch"}, {"k_async", "k_sync("}, {"bsp"}],
            [{"asp"}, {"k_batch"}, {"k_batch"}, {"k_sync(", "k_async"}, {"bsp"}],
        )
    passes = {
        series: next(x for x in range(600, 1500, 50) if at("8", "exp(1)", series, x) < at("8", "exp(1)", "asp", x))
        for series in ("k_batch_sync(k=4)", "k_batch_async(k=4)", "k_sync(k=4)", "k_async(k=4)")
    }
    batch, sync = sorted(set(passes.values()))
    yield f"In the mean, K-batch passes it at about {batch:,} s, K-async and K-sync at about {sync:,} s"
    level = next(x for x in range(2000, 6000, 250) if at("8", "exp(1)", "bsp", x) < end("8", "exp(1)", "asp") + 0.005)
    yield f"Sync reaches its level at about {level:,} s | {len(eight['bsp'])} |"
    yield f"take the same {1 / per_s('k_batch_async(k=4)'):.1f} s per update"
    ages = [
        mean(line["mean_staleness"] for line in eight[name].values()) for name in ("k_batch_async(k=4)", "k_async(k=4)")
    ]
    yield f"a gradient of the first is {ages[0]:.2f} versions old on average. K-async ({ages[1]:.1f})"
    yield f"makes {per_s('asp') / per_s('k_batch_sync(k=4)'):.0f} times as many updates"
    yield f"{per_s('asp') / per_s('bsp'):.0f} times as many as sync"
    fours = {round(end("8", "exp(1)", name), 1) for name in eight if "k=4" in name}
    assert fours == {0.7}
    yield f"its loss stays around {end('8', 'exp(1)', 'asp'):.2f}, where 4 gradients per update end at 0.70"
    yield f"it ends at {end('8', 'exp(1)', 'bsp'):.3f}, and K-batch at {end('8', 'exp(1)', 'k_batch_sync(k=4)'):.3f}"
    assert round(end("8", "exp(1)", "k_batch_async(k=4)"), 3) == round(end("8", "exp(1)", "k_batch_sync(k=4)"), 3)
    yield f"does not reach it in {eight['bsp'][0]['asked']['seconds']:,} s"
    ten = panel("10", "exp(1)")
    batch, single = (
        mean(first_s(line, 0.75) for line in ten[f"{name}(k=4)"].values()) for name in ("k_batch_async", "k_async")
    )
    yield f"loss 0.75 after {batch:.0f} s against {single:.0f} s"
    harmonic = sum(1 / i for i in range(5, 9))
    yield f"{single / batch:.2f} times sooner (theory: {harmonic:.3f} / 0.5 = {harmonic / 0.5:.2f})"
    accuracies = (end("10", "exp(1)", f"{name}(k=4)") for name in ("k_batch_async", "k_async"))
    yield "accuracy at the end {:.3f} and {:.3f} | {} |".format(*accuracies, len(ten["k_async(k=4)"]))
    for x in (400, 600):
        assert order(panel("11", "1 + exp(1)"), x, FIGURES["11"]) == " < ".join(
            f"k_sync(k={k})" for k in (8, 6, 4, 2, 1)
        )
    best = [(order(panel("12", "1 + exp(1)"), x, FIGURES["12"])[9], x) for x in (100, 200, 400, 800, 1600, 2400)]
    assert [k for k, _ in best] == ["2", "4", "4", "6", "6", "8"]
    yield "K = {} at {} s, {} at {} to {} s, {} at {} to {:,} s, {} at {:,} s | 3 |".format(
        *best[0], *best[1], best[2][1], *best[3], best[4][1], *best[5]
    )
    ends = [end("12", "1 + exp(1)", f"k_sync(k={k})") for k in (1, 2, 4, 6, 8)]
    assert round(ends[3], 2) == round(ends[4], 2)
    yield "keeps the loss at {:.2f}, of K = 2 at {:.2f}, of 4 at {:.2f}, of 6 and 8 at {:.2f}".format(*ends[:4])


def of_minibatches():
    """Yield the numbers of Fig. 13 and 14."""
    by_m = panel("13", "m / 64 + exp(1)")
    *usual, _ = (at("13", "m / 64 + exp(1)", name, 200) for name in by_m)
    yield f"{', '.join(f'{loss:.3f}' for loss in usual)} after 200 updates for m = 1, 4, 16, 64, 256"
    orders = {
        x: order(panel("14", "m / 64 + exp(1)"), x, FIGURES["14"]).split(" < ") for x in (200, 400, 800, 1600, 1900)
    }
    best = {x: names[0].removeprefix("bsp, m=") for x, names in orders.items()}
    assert best == {200: "4", 400: "4", 800: "16", 1600: "16", 1900: "16"}
    assert {names[-1] for names in orders.values()} == {"bsp, m=1024"}
    seeds = len(by_m["bsp, m=1"])
    yield f"By time m = 4 is best at 200 and 400 s, 16 from 800 s on, at every seed; m = 1,024 is the worst | {seeds} |"


def of_cifar():
    """Yield the numbers of Fig. 9."""
    nine = panel("9", "pixels 0 to 1")
    bad = [100 * np.mean(np.array(line["probe_loss"]) > log(10)) for line in nine["asp"].values()]
    most = max(max(line["probe_loss"]) for line in nine["asp"].values())
    yield f"in {span(bad, 0)} % of all measurements, up to {most:.1f}"
    assert max(max(line["probe_loss"]) for line in nine[STALENESS].values()) < log(10)
    ends = {name: end("9", "pixels 0 to 1", name) for name in nine}
    half, seeds = ends["asp, lr=0.005"], len(nine["asp"])
    yield f"ends at {ends[STALENESS]:.2f}. But half the fixed rate ends at {half:.2f} | {seeds} |"
    yield "{:.3f} and {:.3f} at the end against {:.3f}".format(
        ends["asp, lr=0.005"], ends["asp, lr=0.0025"], ends[STALENESS]
    )
    late = [value for line in nine["asp"].values() for value in line["probe_loss"][len(line["probe_loss"]) // 2 :]]
    yield f"oscillates between {min(late):.2f} and {max(late):.1f} indefinitely"
    yield f"staleness {mean(line['mean_staleness'] for line in nine['asp'].values()):.1f} on average"
    ranks = {x: order(nine, x, FIGURES["9"]).split(" < ") for x in (0.2, 0.5, 1, 2, 3, 3.8)}
    assert all(rank[0] == STALENESS for x, rank in ranks.items() if x <= 0.5)
    for name, since in (("asp, lr=0.005", 1), ("asp, lr=0.0025", 2)):
        assert all((rank.index(name) < rank.index(STALENESS)) == (x >= since) for x, rank in ranks.items())
    for pixels, row in (("0 to 1", "0 to 1"), ("normalised", "mean 0, variance 1")):
        fixed, stale = (
            f"{end('9', f'pixels {pixels}', name):.2f} ({span(each('9', f'pixels {pixels}', name, worst), digits)})"
            for name, digits in (("asp", 1), (STALENESS, 2))
        )
        steps = span([line["mean_step_scale"] for line in panel("9", f"pixels {pixels}")[STALENESS].values()], 2)
        yield f"| {row} | {fixed} | {stale} | {steps} |"
    whole = panel("9", "pixels 0 to 255")
    fixed, stale, sync = (round(end("9", "pixels 0 to 255", name), -3) for name in ("asp", STALENESS, "bsp"))
    step = span([line["mean_step_scale"] for line in whole[STALENESS].values()], 2)
    yield f"| 0 to 255 | {fixed:,.0f} | {stale:,.0f} | {step} |"
    yield f"even sync, without any staleness, ends at {sync:,.0f}"


def test_the_page_has_the_numbers_of_the_stored_results():
    check_page(RESULTS.parent / "README.md", [*of_theory(), *of_mnist(), *of_minibatches(), *of_cifar()], GIVEN)


def test_the_tables_are_those_of_the_stored_results():
    check_tables(tables, RESULTS)
