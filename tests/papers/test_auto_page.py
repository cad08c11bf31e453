"""The page of `auto`: its numbers are those of the stored results."""

from functools import cache
from math import exp, log
from statistics import fmean

from paceline.utils.confidence_intervals import interval_of_mean
from page_numbers import check_page, span
from papers.auto.settings import CASES, FINAL_GRADIENTS, RESULTS
from papers.auto.table import BSP, tables
from papers.auto.training import mean_s
from papers.dbw.settings import RESULTS as DBW_RESULTS
from papers.store import Store, figure_store

GIVEN = [
    "**Set-up.**...",
    "- **digits:**...",
    "4 to 6 times too large at first",  # not stored
    *("7 versions old", "most intervals of the ratios include 1"),
    *(
        "digits, B = 16",
        "digits, B = 500",
        "B = 16",
        "B = 500",
        "B = 64",
        "mnist, B = 64",
        "B = 500, 8 workers",
        "k = 1",
    ),
    *("alpha = 1", "alpha = 0.2", "`Job(microbatches=2)`", "D = 5"),
    # Of an earlier version of `auto`, and of a fit to gradients that is not stored.
    "**The price of staleness under AdamW.**...",
]


@cache
def lines(figure):
    """Return the results of a figure, by case, protocol and rule."""
    found = figure_store(figure, RESULTS).lines()
    return {(line["asked"]["case"], *line["asked"]["series"].rsplit(", ", 1)): line["runs"] for line in found}


def seconds(case, protocol, rule="noise"):
    figure = "ruled" if rule == "noise" else "tuned"
    return mean_s(lines(figure)[case, protocol, rule])


def best(case):
    """Return the fastest protocol at its own rate."""
    return min(
        (each for each, _ in (key[1:] for key in lines("tuned") if key[0] == case)),
        key=lambda each: seconds(case, each, "own rate"),
    )


def against_the_fastest(case):
    return seconds(case, "auto") / seconds(case, best(case), "own rate")


def than_bsp(case):
    return f"{seconds(case, 'bsp', 'own rate') / seconds(case, 'auto'):.1f}"


def interval_of_ratio(case):
    """Return the ends of the interval of the paired ratio of `auto` to the fastest protocol at its own rate."""
    pairs = zip(lines("ruled")[case, "auto", "noise"], lines("tuned")[case, best(case), "own rate"], strict=True)
    interval = interval_of_mean([ours["seconds"] / theirs["seconds"] for ours, theirs in pairs])
    return interval.low, interval.high


def of_the_rule(case):
    """Return the times under the rule in units of those at the own rate: geometric mean, and those above 1."""
    ratios = {
        each: seconds(case, each) / seconds(case, each, "own rate")
        for of, each, _ in lines("ruled")
        if of == case and each != "auto"
    }
    worst = max(ratios, key=ratios.get)
    return exp(fmean(map(log, ratios.values()))), ratios.pop(worst), worst, max(ratios.values(), default=0)


def bold(value, bar, text):
    return f"**{text}**" if round(value, 2) > bar else text


def of_the_rate():
    """Yield the cells of the rows on the rule."""
    for case in ("digits, B=16", "digits, B=500"):
        mean, worst, name, _ = of_the_rule(case)
        yield f"{mean:.2f}, {worst:.2f} (`{name}`) |"
    for case in ("mnist, B=64", "mnist, B=500"):
        mean, worst, name, next_one = of_the_rule(case)
        yield f"{mean:.2f}, **{worst:.2f}** (`{name}`; five others at most {next_one:.2f}) |"
    case = "mnist, B=64, two microbatches"
    yield f"| ... `pull(k=1)` with two microbatches, which measure the variance | 1.4 | {of_the_rule(case)[1]:.2f} |"
    yield f"then it takes {of_the_rule(case)[1]:.2f} times the seconds of its own rate"
    mean, worst, name, _ = of_the_rule("gpt, one slow")
    yield f"{mean:.2f}, {worst:.2f} (`{name}`) |"
    both = (of_the_rule(case) for case in ("gpt, transient", "gpt, ladder"))
    yield "{} |".format("; ".join(f"{mean:.2f}, {worst:.2f} (`{name}`)" for mean, worst, name, _ in both))


def of_auto():
    """Yield the cells of the rows on `auto`."""
    first, second = "digits, B=16", "digits, B=500"
    yield f"{against_the_fastest(first):.2f}; {against_the_fastest(second):.2f} (`{best(second)}`)"
    yield f"{than_bsp(first)} and {than_bsp(second)} times faster than `bsp` |"
    case = "mnist, B=500"
    yield f"{against_the_fastest(case):.2f} (`{best(case)}`); {than_bsp(case)} times faster than `bsp` |"
    case = "mnist, B=64"
    yield f"{against_the_fastest(case):.2f} (`{best(case)}`); {than_bsp(case)} times faster than `bsp` |"
    names = ("gpt, one slow", "gpt, transient", "gpt, ladder")
    ratios = [(against_the_fastest(case), best(case)) for case in names]
    yield "; ".join(f"{bold(ratio, 1.15, f'{ratio:.2f}')} (`{name}`)" for ratio, name in ratios)
    yield f"{'; '.join(map(than_bsp, names))} times |"
    alone, ours = seconds("mnist, B=500, alpha=1", "pull(k=1)", "own rate"), seconds("mnist, B=500, alpha=1", "auto")
    yield f"{ours / alone:.2f}: {ours:.1f} s against {alone:.1f} s"
    dbw = [
        line["time_s"]
        for line in Store(DBW_RESULTS / "figure6.jsonl").lines()
        if (line["asked"]["case"], line["asked"]["series"]) == ("alpha=1", "dbw") and line["asked"]["seed"] < 5
    ]
    yield f"{fmean(dbw) / ours:.1f} times: {fmean(dbw):.0f} s, five seeds"
    alone, ours = (
        seconds("mnist, B=500, alpha=0.2", "pull(k=1)", "own rate"),
        seconds("mnist, B=500, alpha=0.2", "auto"),
    )
    yield f"{ours / alone:.2f}: {ours:.0f} s against {alone:.0f} s"


def difference(case, protocol, rule, name):
    """Return the interval of the difference to bsp of a metric on unseen data."""
    ends = lines("final")
    pairs = zip(ends[case, protocol, rule], ends[(case, *BSP.rsplit(", ", 1))], strict=True)
    return interval_of_mean([one[name] - other[name] for one, other in pairs])


def of_unseen_data():
    """Yield the cells of the rows on unseen data."""

    def nats(protocol, rule="noise"):
        each = difference("gpt, one slow", protocol, rule, "loss")
        return f"{abs(each.estimate):.2f} (+- {each.high - each.estimate:.2f})"

    assert difference("gpt, one slow", "auto", "noise", "loss").estimate < 0
    yield f"`auto` {nats('auto')} and `k_sync(k=4)` {nats('k_sync(k=4)')} better"
    yield f"**`asp` {nats('asp')} worse**, at its own rate {nats('asp', 'own rate')} worse |"
    yield f"validation loss after {FINAL_GRADIENTS['gpt, one slow']} gradients"
    yield f"test images after {FINAL_GRADIENTS['mnist, B=64']:,} gradients"
    case = "mnist, B=64"
    ruled = {
        each: difference(case, each, rule, "accuracy")
        for of, each, rule in lines("final")
        if (of, rule) == (case, "noise")
    }
    better = [100 * each.estimate for each in ruled.values()]
    ours = ruled["auto"]
    assert min(each.low for each in ruled.values()) > 0  # "no interval includes a worse one"
    half = 100 * (ours.high - ours.estimate)
    yield f"{span(better, 1)} points better (`auto` {100 * ours.estimate:.1f} +- {half:.1f})"
    own, ruled = (difference("gpt, one slow", "asp", rule, "loss").estimate for rule in ("own rate", "noise"))
    yield f"it ends {own:.2f} nats above `bsp`"
    yield f"The rule adds {ruled - own:.2f} nats"


def of_the_text():
    """Yield the numbers of the text below the table."""
    bsp = [run["seconds"] for run in lines("tuned")["digits, B=16", "bsp", "own rate"]]
    yield f"spread by a factor of {max(bsp) / min(bsp):.1f}"
    *usual, last = sorted(run["seconds"] for run in lines("ruled")["gpt, one slow", "auto", "noise"])
    static = seconds("gpt, one slow", best("gpt, one slow"), "own rate")
    yield f"four of five runs took {span(usual, 0)} s, and the best static {static:.0f} s in the mean"
    yield f"The fifth took {last:.0f} s"
    case = "gpt, ladder"
    stale = seconds(case, "k_async(k=4)", "own rate") / seconds(case, "k_sync(k=4)", "own rate")
    yield f"The static one is {stale:.2f} times slower at its own rate"
    for name in ("gpt, one slow", "gpt, transient", "gpt, ladder"):
        low, high = interval_of_ratio(name)
        assert low < 1 < high
    yield "each interval includes 1"
    ours = [seconds(case, "auto") for case in ("digits, B=16", "digits, B=500")]
    yield "from 42.7 to {:.1f} s at B = 16 and left {:.1f} s at B = 500".format(*ours)


def test_the_page_has_the_numbers_of_the_stored_results():
    parts = (of_the_rate, of_auto, of_unseen_data, of_the_text)
    check_page(RESULTS.parent / "README.md", [text for part in parts for text in part()], GIVEN)


def test_the_tables_are_those_of_the_stored_results():
    assert "\n".join(tables(RESULTS)) + "\n" == (RESULTS / "tables.md").read_text()
    protocols = {(case, protocol) for figure in ("tuned", "ruled") for case, protocol, _ in lines(figure)}
    assert protocols <= {(case, each) for case, about in CASES.items() for each in ("auto", "bsp", *about.protocols)}
