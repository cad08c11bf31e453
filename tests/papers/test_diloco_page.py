"""The page of local steps and DiLoCo: its numbers are those of the stored results."""

from statistics import mean

from paceline.utils.confidence_intervals import interval_of_mean
from page_numbers import check_page, check_tables
from papers.diloco.run import runs_of
from papers.diloco.settings import RESULTS
from papers.diloco.table import tables
from papers.store import figure_store

NESTEROV = "bsp + local_steps(H=16, outer='nesterov(lr=0.7, momentum=0.3)')"
ROWS = {"`bsp`": "bsp", "`bsp + local_steps(H=16)`": "bsp + local_steps(H=16)", "DiLoCo": NESTEROV}
GIVEN = [
    "A character-level GPT of a million parameters...",
    "**Set-up.**...",
    "So the bytes per sample are 1/16 of those of `bsp` in both directions, and 1/63 with",
    "With 16 local steps, a gradient and a version are sent for 16 minibatches",
    *("the best, and 0.9, the value for long runs", "a sixteenth", "AdamW at 2e-3 or 5e-4 is worse than at 1e-3"),
    "**Not run:**...",  # measured by benchmarks/two_sites.py
]


def end(line):
    return line["loss"][-1]


def rows():
    """Yield the rows of the table of results."""
    for case, gradients in (("equal", "3,200"), ("equal, twice as long", "6,400")):
        runs = runs_of(case, RESULTS)
        for name, series in ROWS.items():
            if series not in runs:
                continue
            losses, first = runs[series], runs["bsp"]
            interval = interval_of_mean([end(line) - end(first[seed]) for seed, line in losses.items()])
            difference = f"{interval.estimate:+.3f} +- {interval.high - interval.estimate:.3f}"
            pushes = mean(line["pushes"] / line["asked"]["gradients"] for line in losses.values())
            cells = [
                gradients if series == "bsp" else "",
                name,
                f"{mean(map(end, losses.values())):.3f}",
                "-" if series == "bsp" else difference,
                f"{mean(line['time_s'] for line in losses.values()):,.0f}",
                "1" if pushes == 1 else f"1/{1 / pushes:.0f}",
            ]
            yield f"| {' | '.join(cells)} |".replace("|  |", "| |")


def text():
    """Yield the numbers of the text."""
    short, long = (runs_of(case, RESULTS) for case in ("equal", "equal, twice as long"))
    assert {len(runs) for runs in (*short.values(), *long.values())} == {5}  # "Five paired seeds"
    behind = mean(end(line) for line in short[NESTEROV].values()) - mean(end(line) for line in short["bsp"].values())
    yield f"After 3,200 gradients, DiLoCo is {behind:.3f} nats above `bsp`"
    curves = {
        name: [mean(values) for values in zip(*(line["loss"] for line in long[name].values()), strict=True)]
        for name in ("bsp", NESTEROV)
    }
    at = 4_800 // long["bsp"][0]["asked"]["evaluate_every"] - 1
    yield f"{curves[NESTEROV][at] - curves['bsp'][at]:.2f} after 4,800 gradients, none after 6,400"
    lowest = {name: mean(min(line["loss"]) for line in long[name].values()) for name in curves}
    yield f"its lowest loss on the way is {lowest['bsp'] - lowest[NESTEROV]:.3f} above that of DiLoCo"
    shares = []
    for seed, line in long["bsp"].items():
        ours = long[NESTEROV][seed]
        reached = next(s for s, loss in zip(ours["at_s"], ours["loss"], strict=True) if loss <= end(line))
        shares.append(reached / line["time_s"])
    yield f"in {mean(shares):.1f} of the time"
    searched = {line["asked"]["series"]: end(line) for line in figure_store("outer", RESULTS).lines()}
    best = min(searched, key=searched.get)
    assert best == NESTEROV
    yield "In these short runs 0.3 is the best"
    plain = searched["bsp + local_steps(H=16, outer='sgd(lr=1)')"] - searched[best]
    assert plain <= 0.01
    yield "The plain mean (`sgd(lr=1)`) is within 0.01 nats of the best"


def test_the_page_has_the_numbers_of_the_stored_results():
    check_page(RESULTS.parent / "README.md", [*rows(), *text()], GIVEN)


def test_the_tables_are_those_of_the_stored_results():
    check_tables(tables, RESULTS)
