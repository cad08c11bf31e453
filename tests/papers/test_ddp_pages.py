"""The pages of docs/evidence: their tables and the numbers of their text are those of the stored results."""

from functools import cache
from math import isfinite
from statistics import geometric_mean

import pytest

from page_numbers import at_most, check_page
from papers.ddp import real, table
from papers.ddp.outcomes import all_lines, outcomes, speed_up
from papers.ddp.patterns import PATTERNS
from papers.ddp.settings import AUTO, BALANCED, DDP, GRID, JOBS, LEASE_S, QUEUE, RESULTS, TORCHFT_STEP_S
from papers.store import Store

pytestmark = pytest.mark.docs  # the times of all runs are simulated, which takes seconds

K_SYNC = "k_sync(k=n-1)"
GIVEN = {
    "index": [
        "- **Jobs:**...",
        "| [another worker is slow every 20 round trips]...",
        "| [5 % of the gradients are slow, on any worker]...",
        "| [the workers have speeds from 1 to 1/3]...",
        "Where one worker of 8 is always slow",
        *("plus 0.02 nats", "A gradient takes 0.1 s, with a standard deviation of 5 %", "evaluated 40 times"),
    ],
    "none": ["All workers need 0.1 s for a gradient, with a standard deviation of 5 %"],
    "rotating": ["# Another worker is slow every 20 round trips", "3 times slower, for 2 s. These are 20 gradients"],
    "transient": ["5 % of the gradients take 5 times longer"],
    "death": ["a checkpoint of every 10 minutes"],
    "ladder": ["from 1 to 1/3", "1 to 1/3", "1/3"],
}


@cache
def kept():
    return all_lines(RESULTS)


@cache
def of(job, pattern, n=8):
    return outcomes(next(each for each in GRID if (each.job, each.pattern, each.n) == (job, pattern, n)), kept())


def updates(job, n):
    """Return the updates of DDP, of which there is one for each round of all workers."""
    (made,) = {
        line["evaluated"][-1]["updates"]
        for line in kept()
        if (line["asked"]["job"], line["asked"]["n"], line["asked"]["series"]) == (job, n, DDP)
    }
    return made


def reached(job, pattern, name):
    runs = of(job, pattern)[name]
    return sum(isfinite(each.target_s) for each in runs.values()), len(runs)


def chosen(job, pattern):
    """Return the last choice of `auto` in each run."""
    return [
        line["chosen"][-1]
        for line in kept()
        if (line["asked"]["job"], line["asked"].get("pattern"), line["asked"]["series"]) == (job, pattern, AUTO)
    ]


def real_times():
    """Return how far real times, relative to DDP, are from simulated ones: in the mean, and in runs of `auto`."""
    means, singles = {}, []
    for (pattern, contender, _), each in real.compared(Store(RESULTS / "real.jsonl").lines()).items():
        means.setdefault((pattern, contender), []).append((each.real.run, each.simulated.run))
        if contender == AUTO:
            singles.append(abs(each.real.run / each.simulated.run - 1))
    ratios = [[geometric_mean(column) for column in zip(*pairs, strict=True)] for pairs in means.values()]
    return max(abs(ours / simulated - 1) for ours, simulated in ratios), max(singles)


def texts_of_the_index():
    """Yield the numbers of the text of the first page."""
    assert reached("resnet20", "transient", AUTO) == (2, 3)
    assert reached("resnet20", "transient", K_SYNC) == (3, 3)
    assert 1.9 < speed_up(of("resnet20", "transient")[K_SYNC], of("resnet20", "transient")[DDP]).estimate < 2.1
    yield f"ResNet-20 makes {updates('resnet20', 8)} updates under DDP"
    losses = [each.loss for each in of("resnet20", "transient")[DDP].values()]
    yield f"its final losses vary by {max(losses) - min(losses):.1f} nats between seeds"
    assert sorted(chosen("gpt", "quarter")) == ["k_async(k=6)"] * 4 + ["k_sync(k=7)"]
    assert reached("gpt", "quarter", AUTO) == (3, 5)
    assert reached("gpt", "quarter", K_SYNC) == (5, 5)
    yield f"DDP makes {updates('gpt', 8)} updates on the GPT"
    large = JOBS["mnist"].gradients[32]
    yield f"With 32 workers DDP makes {updates('mnist', 32)} updates from {large:,} minibatches"
    assert updates("mnist", 32) == large / 32
    late = speed_up(of("mnist", "transient", 32)[BALANCED], of("mnist", "transient", 32)[DDP]).estimate
    yield f"{100 * (1 - late):.0f} % slower with 32 workers"
    queued = speed_up(of("mnist", "transient")[QUEUE], of("mnist", "transient")[DDP]).estimate
    yield f"`balanced, queue` is {queued:.1f} times faster than DDP there"
    even = speed_up(of("mnist", "none", 32)[QUEUE], of("mnist", "none", 32)[DDP]).estimate
    yield f"the queue costs {100 * (1 / even - 1):.0f} % with 32 workers"
    yield f"each with a cost of {1000 * LEASE_S:.0f} ms"
    mean, single = real_times()
    yield f"within {at_most(100 * mean, 1)} % of the simulated ones, in the mean of three seeds"
    yield f"In single runs `auto` is up to {100 * single:.0f} % off"
    yield f"needs {1000 * TORCHFT_STEP_S:.1f} ms more for each"
    assert JOBS["smollm2"].gradients[8] == 320


def test_the_pages_show_the_kept_results():  # one test: each process that needs the times computes them for seconds
    checked = table.check(Store(RESULTS / "real.jsonl").lines())
    shown = {
        table.README: list(table.summary(kept())),
        table.PAGES / "index.md": [*table.overview(kept()), *checked],
        **{table.PAGES / f"{pattern}.md": list(table.tables(pattern, kept())) for pattern in PATTERNS},
    }
    pages = {path: path.read_text() for path in shown}
    assert [path.name for path, page in pages.items() if table.with_tables(page, shown[path]) != page] == []
    for path, lines in shown.items():
        if path != table.README:
            texts = texts_of_the_index() if path.stem == "index" else ()
            results = [line for line in lines if line and not line.startswith("| ---")]
            check_page(path, [*results, *texts], GIVEN.get(path.stem, []))
