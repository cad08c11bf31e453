"""Write results/tables.md: loss after equal samples, time and messages, against the first series of each case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.utils.confidence_intervals import interval_of_mean
from papers.diloco.run import runs_of
from papers.diloco.settings import CASES, GRADIENTS, RESULTS
from papers.series import SPREAD, Runs, spread
from papers.store import figure_store


def main(folder: Path = RESULTS) -> None:
    (folder / "tables.md").write_text("\n".join(tables(folder)) + "\n")


def tables(folder: Path) -> Iterator[str]:
    """Yield the lines of a page: the searches, and one table per case."""
    yield from [f"## Searches: one seed, validation loss after {GRADIENTS:,} gradients", ""]
    yield from ["| protocol | rate of AdamW | loss |", "| --- | --- | --- |"]
    for figure in ("outer", "rates"):
        for line in figure_store(figure, folder).lines():
            yield f"| `{line['asked']['series']}` | {line['asked']['lr']:g} | {line['loss'][-1]:.3f} |"
    yield ""
    for name, case in CASES.items():
        if runs := runs_of(name, folder):
            head = f"After {case.gradients:,} gradients: {SPREAD}. Differences are those of paired seeds."
            yield from [f"## {name}", "", head, ""]
            yield from [*_table(runs), ""]


def _table(runs: Mapping[str, Runs]) -> Iterator[str]:
    first = next(iter(runs))
    yield f"| protocol | loss | difference to {first} | virtual seconds | messages a gradient |"
    yield "| --- | --- | --- | --- | --- |"
    for series, of_seed in runs.items():
        losses = [line["loss"][-1] for line in of_seed.values()]
        differences = [
            line["loss"][-1] - runs[first][seed]["loss"][-1] for seed, line in of_seed.items() if seed in runs[first]
        ]
        interval = interval_of_mean(differences) if series != first else None
        half = f" +- {interval.high - interval.estimate:.3f}" if interval is not None else ""
        difference = "-" if series == first else f"{sum(differences) / len(differences):+.3f}{half}"
        times = [line["time_s"] for line in of_seed.values()]
        messages = [line["pushes"] / line["asked"]["gradients"] for line in of_seed.values()]
        columns = (spread(losses, 3), difference, spread(times, 0), f"{sum(messages) / len(messages):.3f}")
        yield f"| `{series}` | {' | '.join(columns)} |"


if __name__ == "__main__":
    main()
