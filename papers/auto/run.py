"""Compare `auto` and the rule "noise" with tuned rates on real jobs; saved runs are not repeated.

python -m papers.auto.run --folder data                       # everything: first tuned rates, then the rule
python -m papers.auto.run --folder data --figure ruled --only "digits.*/auto"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path

from papers.auto.settings import CASES, FINAL_GRADIENTS, RESULTS
from papers.auto.training import Final, Ruled, Tuned, mean_s
from papers.command import Paper
from papers.store import Line, figure_store
from papers.tasks import Task

FIGURES = ("tuned", "ruled", "final")


def tasks(figure: str, seeds: int | None, only: str) -> list[Task]:
    """Return the tasks of a figure; all but the first one need the tuned rate of BSP."""
    lines = figure_store("tuned", RESULTS).lines()
    tasks_of: Mapping[str, Iterator[Tuned | Ruled | Final]] = {
        "tuned": tuned(),
        "ruled": ruled(lines),
        "final": final(lines),
    }
    return [task for task in tasks_of[figure] if re.search(only, f"{task.case}/{task.protocol}")]


def tuned() -> Iterator[Tuned]:
    """Yield the searches, BSP first."""
    for name, case in CASES.items():
        protocols = ("bsp", *case.protocols) if case.searches else case.protocols
        yield from (Tuned(name, protocol) for protocol in protocols)


def ruled(lines: Sequence[Line]) -> Iterator[Ruled]:
    """Yield the runs under the rule for the cases whose tuned rate of BSP is known."""
    bsp = {line["asked"]["case"]: line for line in lines if line["asked"]["series"].startswith("bsp,")}
    for name, case in CASES.items():
        if name in bsp or not case.searches:
            lr, bsp_s = (bsp[name]["lr"], mean_s(bsp[name]["runs"])) if case.searches else (case.lr, inf)
            yield from (Ruled(name, protocol, lr, bsp_s) for protocol in ("auto", *case.protocols))


def final(lines: Sequence[Line]) -> Iterator[Final]:
    """Yield the runs to equal samples: of every protocol under the rule, and of bsp and asp at their own rates."""
    rates = {(line["asked"]["case"], line["asked"]["series"].removesuffix(", own rate")): line["lr"] for line in lines}
    for name in FINAL_GRADIENTS:
        if (name, "bsp") in rates:
            own = [protocol for protocol in ("bsp", "asp") if (name, protocol) in rates]
            yield from (Final(name, protocol, rates[name, protocol], "constant") for protocol in own)
            ruled = ("auto", *CASES[name].protocols)
            yield from (Final(name, protocol, rates[name, "bsp"], "noise") for protocol in ruled)


def main(arguments: Sequence[str] | None = None) -> None:
    Paper(__doc__ or "", FIGURES, RESULTS, tasks, figure_store, folder=Path("data")).run(arguments)


if __name__ == "__main__":
    main()
