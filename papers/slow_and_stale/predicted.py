"""Fig. 5 to 7: seconds per update in theory and in simulation, and bounds on the error over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np

import paceline as pl
from paceline.catalogue.parser import parse_plan
from papers.slow_and_stale.settings import BOUNDS, DISTRIBUTIONS, TIMES
from papers.store import Line, rounded
from papers.tasks import Where


@dataclass(frozen=True)
class Runtime:
    """Task: one protocol under one law, for every P and K of a figure."""

    figure: str
    law: str
    protocol: str
    seed: int

    def asked(self) -> Line:
        """Return the fields as plain JSON."""
        about = TIMES[self.figure]
        return {
            "figure": self.figure,
            "law": self.law,
            "series": self.protocol,
            "workers": list(about.workers),
            "k": list(about.ks),
            "updates": about.updates,
            "in_rounds": about.in_rounds,
            "seed": self.seed,
        }

    def carry_out(self, where: Where) -> Line:
        """Return seconds per update for every P, and for every K within it."""
        about = TIMES[self.figure]
        cells = [
            self._cell(n, about.protocols[self.protocol].format(k=k), where)
            for n, k in product(about.workers, about.ks)
        ]
        theory, lower, upper, kinds, simulated = zip(*cells, strict=True)
        return {
            "theory_s": rounded(theory),
            "lower_s": rounded(lower),
            "upper_s": rounded(upper),
            "kind": list(kinds),
            "simulated_s": rounded(simulated),
        }

    def _cell(self, n: int, protocol: str, where: Where) -> tuple[float, float, float, str, float]:
        about, cluster = TIMES[self.figure], pl.Cluster(n, DISTRIBUTIONS[self.law])
        known = pl.theory.expected(parse_plan(protocol), cluster)
        updates = where.updates or about.updates * (n // known.k if about.in_rounds else 1)
        simulated = pl.simulate(protocol, cluster, updates=updates, seed=self.seed)
        return known.seconds_per_update, known.lower_s, known.upper_s, known.kind, simulated.seconds_per_update


def runtimes(figure: str, seeds: int | None) -> Iterator[Runtime]:
    """Yield the tasks of Fig. 5 or 6."""
    about = TIMES[figure]
    for seed, law, protocol in product(range(seeds or about.seeds), about.laws, about.protocols):
        yield Runtime(figure, law, protocol, seed)


@dataclass(frozen=True)
class ErrorBounds:
    """Task of Fig. 7."""

    def asked(self) -> Line:
        """Return the fields as plain JSON."""
        return {
            "figure": "7",
            "series": [protocol.name for protocol in BOUNDS.protocols],
            "cluster": str(BOUNDS.cluster),
            "constants": asdict(BOUNDS.constants),
            "eta": BOUNDS.eta,
            "seconds": BOUNDS.seconds,
            "points": BOUNDS.points,
        }

    def carry_out(self, where: Where) -> Line:
        """Return the bounds at each time, and the times at which the best protocol changes."""
        at_s = np.linspace(0, BOUNDS.seconds, BOUNDS.points)
        tradeoff = pl.theory.tradeoff(BOUNDS.protocols, BOUNDS.cluster, BOUNDS.constants, BOUNDS.eta, at_s)
        return {
            "times_s": rounded(at_s),
            "errors": {name: rounded(errors) for name, errors in tradeoff.errors.items()},
            "seconds_per_update": {name: each.seconds_per_update for name, each in tradeoff.runtimes.items()},
            "best": changes(at_s[1:], tradeoff.best[1:]),  # all are equal at the start
        }


def changes(times_s: Iterable[float], names: Iterable[str]) -> list[tuple[float, str]]:
    """Return the name after each change, with the first of its times.

    >>> changes([1.0, 2.0, 3.0], ["asp", "asp", "bsp"])
    [(1.0, 'asp'), (3.0, 'bsp')]
    """
    found: list[tuple[float, str]] = []
    for at_s, name in zip(times_s, names, strict=True):
        if not found or found[-1][1] != name:
            found.append((float(at_s), name))
    return found
