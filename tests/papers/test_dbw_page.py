"""The page of DBW: its numbers are those of the stored results."""

from functools import cache
from statistics import mean, median

from page_numbers import check_page, check_tables, span
from papers.dbw.settings import RESULTS
from papers.dbw.table import tables
from papers.series import series_of, spread
from papers.store import Store

UNPOOLED = "dbw(base=k_sync, pooled=false)"
GIVEN = [
    "Xu, Neglia, Sebastianelli...",
    "Every run is a line of...",
    "**Set-up.**...",
    "**Two baselines.**...",
    "The trace of Fig. 7 was not published...",
    "**Updates of a single gradient.**...",
    # Of versions of the estimator that were not kept.
    "| N+ and L+ at k = 1...",
    "| both, with the mean variance...",
    "| N+ with the mean variance; L+ if the first...",
    "| no N+; L+ likewise...",
    "| N+ with the mean variance; L+ if both...",
    "| neither (the present rule)...",
    "| (12) with means...",
    # Simulated, and not stored.
    "7.36, 7.51, 7.56, 7.51, 7.36 for k = 8 to 12",
    "10.5, 11.0, 11.4, 11.5, 10.9 for k = 12 to 16",
    "In simulations of 10,000 updates",
    "k = 4",
    "k jumps between 1 and 16",
    "in Fig. 4 the first three rows take 407 to 487 s, the fourth 346 and 490 s",
    *("alpha = 1", "alpha = 0.2", "alpha = 0.7", "alpha = 0,", "alpha = 0.1", "alpha = 0.6", "at 0.6", "0.7:", "0.2:"),
    *("D = 20", "D = 5", "k = 16", "k = 10", "k = 1", "(k = 15)", "where all 16 gradients are used", "static k < 16"),
    *("configured, not run: 15 runs of 400 s of a core each | 0 |", "random images | 0 |", "(of 1, 4, 16)"),
    *("B = 500", "B = 128", "B = 16", "fits 16 numbers", "problem (17)", "of k minibatches", "2 / eta", "all 16"),
    *("below 0", "(K_0 = 1", "eta = 0.08", "loss 0.2", "loss 0.1", "the guard (19)", "the variance (10)"),
    *("Targets below 0.2", "k = 10 to 16", "k = 14, 15, 16", "The paper's optima, 8 and 12", "seeds 0 and 1"),
    *("0 / 0", "(11) and (12)"),
]


@cache
def results(figure):
    return Store(RESULTS / f"figure{figure}.jsonl").lines()


def runs(figure, case, series):
    return series_of([line for line in results(figure) if line["asked"]["case"] == case])[series]


def seconds(case, series):
    return {seed: line["time_s"] for seed, line in runs("6", case, series).items()}


def plus_minus(text):
    """Return a spread in the words of the page."""
    return text.replace(" +- ", " ± ")


def ratio(case, slow, fast):
    """Return the paired ratio of two series of Fig. 6, as the page writes it."""
    ours, theirs = seconds(case, fast), seconds(case, slow)
    told = spread([theirs[seed] / ours[seed] for seed in sorted(theirs) if seed in ours], 2)
    return plus_minus(told).replace(" (", " x (", 1)


def of_means(case, slow, fast):
    """Return the ratio of the mean times of the seeds that both series have."""
    ours, theirs = seconds(case, fast), seconds(case, slow)
    both = ours.keys() & theirs.keys()
    return f"{mean(theirs[seed] for seed in both) / mean(ours[seed] for seed in both):.2f} x as a ratio of mean times"


def numbers_of_estimates():
    """Yield the numbers of Fig. 1 and 3, and of Push & Interrupt."""
    by_cluster = {}
    for line in sorted(results("1"), key=lambda line: line["asked"]["seed"]):
        by_cluster.setdefault(line["asked"]["cluster"].partition("timing=")[2], []).append(line)
    ranks = [", ".join(f"{line['rank_correlation']:.2f}" for line in lines) for lines in by_cluster.values()]
    yield "{} at alpha = 0.7, and {} at alpha = 0.2. At alpha = 0, where all 16 gradients are used: {}".format(*ranks)
    errors = [[100 * line["median_error"]["squared_norm"] for line in lines] for lines in by_cluster.values()]
    yield "squared norm {} %, {} % and {} % | 3 |".format(*(span(each, 0) for each in errors))
    third = results("3")
    yield "error {:.1f} % against {:.1f} % of the mean".format(
        *(100 * mean(line["error"][name] for line in third) for name in ("estimated", "naive"))
    )
    assert not any(line["wrong_order"]["estimated"] for line in third)
    yield f"against {100 * mean(line['wrong_order']['naive'] for line in third):.0f} % of the updates | {len(third)} |"
    cells = []
    for case in ("alpha=1", "alpha=0.7", "alpha=0.2"):
        errors = [line["error"] for line in runs("interrupts", case, "random").values()]
        cells.append(" / ".join(f"{mean(each[name] for each in errors):.3f}" for name in ("pooled", "by h")))
    yield "alpha = 1: {}; 0.7: {}; 0.2: {} | 20 |".format(*cells)


def numbers_of_the_figures():
    """Yield the numbers of Fig. 4, 6 and 9."""
    ks = [line["k"] for line in runs("4", "alpha=0.7", "dbw").values()]
    (middle,) = {median(k[2:30]) for k in ks}
    yield f"| {middle:.0f} at every seed | {len(ks)} |"
    ends = [mean(k[-(len(k) // 3) :]) for k in ks]
    yield f"**{mean(ends):.1f} ({min(ends):.1f} to {max(ends):.1f}): not reached** | {len(ks)} |"
    best = "backup(k=10), proportional"
    yield f"{ratio('alpha=1', best, 'dbw')} (k = 10); {of_means('alpha=1', best, 'dbw')} | 10 |"
    yield f"| {ratio('alpha=1', best, 'dbw(D=20)')} | 10 |"
    best = "backup(k=15), proportional"
    longer = ratio("alpha=0.2", best, "dbw(D=20)")
    yield f"| {ratio('alpha=0.2', best, 'dbw')} (k = 15); with D = 20 {longer} | 5 |"
    constant = runs("6", "alpha=0", "backup(k=16), proportional")
    for seed, line in runs("6", "alpha=0", "dbw").items():
        assert set(line["k"]) == {16}
        assert line["time_s"] == constant[seed]["time_s"]
    yield f"| 1.000: k = 16 at every update, the same run | {len(constant)} |"
    yield f"| {ratio('alpha=0.2', 'b_dbw', 'dbw')} | 5 |"
    longer, means = ratio("alpha=1", "b_dbw", "dbw(D=20)"), of_means("alpha=1", "b_dbw", "dbw")
    yield f"| {ratio('alpha=1', 'b_dbw', 'dbw')}: not shown by five seeds; {means}; D = 20: {longer} | 5 |"


def slowed(after_s, series):
    """Return the runs of Fig. 9: updates until k is 8, how many of 30 have a k of 8 to 10, and the loss before.

    Before the slowdown an update takes one second, so the second one after it is the first that begins after it.
    """
    lines = runs("9", f"at {after_s} s", series).values()
    until = [line["k"][after_s:].index(8) for line in lines]
    kept = sorted(sum(8 <= k <= 10 for k in line["k"][after_s + 2 :][:30]) for line in lines)
    return until, ", ".join(map(str, kept)), [line["probe_loss"][after_s // 2 - 1] for line in lines]


def numbers_of_figure_9():
    """Yield the numbers of the slowdown."""
    (until, kept, losses), (sooner, longer, _) = (slowed(160, name) for name in ("dbw", "dbw(window=20)"))
    yield f"`dbw` is first at 8 after {span(until, 0)} updates, and at 8 to 10 in {kept} of the 30"
    yield f"`dbw(window=20)` after {span(sooner, 0)}, in {longer}. The loss is {span(losses, 2)} by then"
    lines = [line for name in ("dbw", "dbw(window=20)") for line in runs("9", "at 160 s", name).values()]
    waits = [line["why"]["no gain"][0] for line in lines]
    (made,) = {line["updates"] for line in lines}
    yield f"In {span(waits, 0)} of the {made} updates no k has an expected gain, and DBW waits for all 16 | 3 |"
    (second, kept, losses), (also, longer, _) = (slowed(24, name) for name in ("dbw", "dbw(window=20)"))
    assert {*second, *also} == {1}
    yield f"at 24 s, where the loss is {span(losses, 1)} |"
    yield f"8 in the second update at every seed; `dbw` is at 8 to 10 in {kept} of the next 30"
    yield f"`dbw(window=20)` in {longer} | 3 |"


def numbers_of_figure_10():
    """Yield the numbers of DBW and AdaSync."""
    both = [[runs("10", case, name)[0] for name in ("adasync", UNPOOLED)] for case in ("alpha=0.1", "alpha=0.6")]
    pooled = [runs("10", "alpha=1", name) for name in ("adasync", "dbw(base=k_sync)")]
    assert [list(lines) for lines in pooled] == [[0, 1]] * 2
    yield (
        "AdaSync {:.0f} s against {:.0f} s at alpha = 0.1, {:.0f} against {:.0f} at 0.6; "
        "at alpha = 1 its mean is {:.0f} against {:.0f} | 1; 2 at alpha = 1 |"
    ).format(
        *(line["time_s"] for lines in both for line in lines),
        *(mean(line["time_s"] for line in lines.values()) for lines in pooled),
    )
    minutes = [line["took_s"] / 60 for lines in both for line in lines]
    yield f"one or two seeds, because a run took {span(minutes, 0)} minutes of a core"
    ks = [k for lines in both for k in lines[0]["k"]]
    yield f"goes from k = {min(ks)} to {max(ks)} as the loss falls from {both[0][0]['probe_loss'][0]:.1f} to 0.07"
    waits = [lines[1]["mean_k"] for lines in both]
    yield f"waits for {waits[1]:.1f} (alpha = 0.6) and {waits[0]:.1f} (0.1) gradients on average"


def numbers_of_static_k():
    """Yield the numbers of static k: gradients needed, and the best k by batch size."""
    used = [
        mean(line["updates"] * line["mean_k"] for line in runs("6", case, f"backup(k={k}), proportional").values())
        for case, k in (("alpha=1", 10), ("alpha=0.2", 14), ("alpha=0.2", 15), ("alpha=0.2", 16))
    ]
    yield f"nearly the same number of gradients ({min(used):,.0f} to {round(max(used), -1):,.0f})"
    first = [runs("6", "alpha=1", f"backup(k={k})")[0]["updates"] for k in (1, 4)]
    whole = runs("6", "alpha=0", "backup(k=16), proportional")[0]["updates"]
    yield f"takes {first[0]} updates with k = 1, {first[1]} with 4 and {whole} with 16"
    slow = [line["updates"] for line in runs("6", "alpha=1", "backup(k=10), proportional").values()]
    yield f"takes {min(slow)} to {max(slow)}, because its rate is 0.05"
    best = {
        case: min((1, 4, 16), key=lambda k: mean(line["time_s"] for line in runs("8", case, f"backup(k={k})").values()))
        for case in ("B=16", "B=128")
    }
    yield f"{best['B=16']} for B = 16 (both seeds) and {best['B=128']} for B = 128 (of 1, 4, 16)"
    yield "B = 500 not run | 2, 1 |"
    for case in ("B=16", "B=128"):
        lines = [runs("8", case, name)[0] for name in (*(f"backup(k={k})" for k in (1, 4, 16)), "dbw")]
        longer = runs("8", case, "dbw(D=20)")[0]["time_s"]
        yield f"| {case.replace('=', ' = ')}, updates | {' | '.join(str(line['updates']) for line in lines)} |"
        cells = [
            f"**{line['time_s']:.0f}**" if i == (case == "B=16") else f"{line['time_s']:.0f}"
            for i, line in enumerate(lines)
        ]
        yield f"| {case.replace('=', ' = ')}, seconds | {' | '.join(cells)} (D = 20: {longer:.0f}) |".replace(
            "|  (", " ("
        )


def numbers_of_the_spread():
    """Yield the numbers of the spread of DBW over seeds, and of its options."""
    longer = runs("6", "alpha=1", "dbw(D=20)")
    times = [line["time_s"] for line in longer.values()]
    yield f"With D = 20 they spread by {max(times) / min(times):.1f} over twenty seeds. One in five took more than 70 s"
    late = [line for line in longer.values() if line["time_s"] > 70]
    assert len(late) == len(longer) / 5
    soon = [line for line in longer.values() if line["time_s"] <= 70]
    waits, others = ([line["why"]["best"][1] for line in each] for each in (late, soon))
    yield f"by its expected gain for {span(waits, 0)} s, the others for {span(others, 0)} s"
    default = list(seconds("alpha=1", "dbw").values())
    assert 3 < max(default) / min(default) < 3.5
    yield f"takes {plus_minus(spread(default, 0)).replace(' (', ' s over ten seeds (')[:-1]} s)"
    middle, first = median(times), [longer[seed]["time_s"] for seed in range(5)]
    yield f"{plus_minus(spread(times, 0)).replace(' (', ' s over 20 seeds (')[:-1]} s, the median {middle:.0f} s)"
    yield f"the first five, {span(first, 0)} s"
    kept = sorted(line["time_s"] for line in runs("4", "alpha=0.7", "dbw").values())
    yield "The present rule takes {:.0f}, {:.0f}, {:.0f}, {:.0f} and {:.0f} s".format(*kept)
    for option in ("unobserved=upper", "beta=2", "no_gain=keep", "late=false", "window=20", "forgetting=0.95"):
        pair = [runs("options", "alpha=1", f"dbw({option})")[seed]["time_s"] for seed in (0, 1)]
        yield f"| `{option}` | {pair[0]:.0f}, {pair[1]:.0f} |"
    for name, series in (("`D=20`", "dbw(D=20)"), ("default", "dbw")):
        yield f"| {name} | {seconds('alpha=1', series)[0]:.0f}, {seconds('alpha=1', series)[1]:.0f} |"


def numbers_of_interrupts():
    """Yield the ratios of the errors of pooled samples to those by (h, k)."""
    ratios = {
        choice: [
            mean(line["error"]["pooled"] / line["error"]["by h"] for line in runs("interrupts", case, choice).values())
            for case in ("alpha=1", "alpha=0.7", "alpha=0.2")
        ]
        for choice in ("random", "b_dbw", "dbw")
    }
    assert all(abs(each - 1) < 0.02 for each in ratios["dbw"])
    yield f"the pooled error is {span(ratios['random'], 2)} times the other"
    yield f"if B-DBW chooses k, {span(ratios['b_dbw'], 2)} times"


def numbers_of_the_conclusions():
    """Yield the numbers of the conclusions."""
    rows = {
        "static, own rate, k = 1": ("backup(k=1)", "backup(k=1)"),
        "static, own rate, k = 4": ("backup(k=4)", "backup(k=4)"),
        "DBW, D = 20": ("dbw(D=20)", "dbw(D=20)"),
        "DBW, D = 5": ("dbw", "dbw"),
        "B-DBW": ("b_dbw", "b_dbw"),
        "best static, proportional": ("backup(k=10), proportional", "backup(k=15), proportional"),
    }
    for row, series in rows.items():
        both = [seconds(case, name) for case, name in zip(("alpha=1", "alpha=0.2"), series, strict=True)]
        yield f"| {row} | {' | '.join(f'{mean(each.values()):.0f} ({len(each)})' for each in both)} |"
    ratios = []
    for case in ("alpha=1", "alpha=0.2"):
        alone = mean(seconds(case, "backup(k=1)").values())
        ratios.append([mean(seconds(case, name).values()) / alone for name in ("dbw", "dbw(D=20)")])
    yield "{:.2f} times faster than DBW's mean and {:.2f} times faster than with D = 20".format(*ratios[0])
    yield "at alpha = 0.2, {:.2f} and {:.2f} times".format(*ratios[1])


def test_the_page_has_the_numbers_of_the_stored_results():
    parts = (
        numbers_of_estimates,
        numbers_of_the_figures,
        numbers_of_figure_9,
        numbers_of_figure_10,
        numbers_of_static_k,
        numbers_of_the_spread,
        numbers_of_interrupts,
        numbers_of_the_conclusions,
    )
    check_page(RESULTS.parent / "README.md", [text for part in parts for text in part()], GIVEN)


def test_the_tables_are_those_of_the_stored_results():
    check_tables(tables, RESULTS)
