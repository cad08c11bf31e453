"""What a search for the switch point has brought: its table for people, and the file for later runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

import tomli_w

from paceline.search.bisection import Bisection
from paceline.switch_timing import SwitchTiming

WIDTH = 80
NONE = "-"
HEADER = '# Written by paceline search; used by --protocol "sync_switch(timing=FILE)".\n\n'


@dataclass(frozen=True)
class Trials:
    """The runs of one setting.

    Attributes:
        fraction: of the workload under the first protocol; 1 for the first one alone.
        accuracies: at the end of each run, nan for one that has diverged.
        times_s: seconds of each run's clock until its end.
    """

    fraction: float
    accuracies: tuple[float, ...]
    times_s: tuple[float, ...]

    @property
    def diverged(self) -> int:
        """How many runs have diverged."""
        return sum(map(isnan, self.accuracies))

    @property
    def mean_s(self) -> float:
        """Mean seconds of the runs that came to their end; nan without any."""
        ended = [time_s for time_s, each in zip(self.times_s, self.accuracies, strict=True) if not isnan(each)]
        return mean(ended) if ended else nan


@dataclass(frozen=True)
class SwitchSearch:
    """A search for the moment at which one protocol gives way to another.

    Attributes:
        first: the protocol to begin with, as it is typed.
        then: the one to go on with.
        cluster: in words.
        stop: of every run, in words.
        bisection: the target, and what is accepted.
        alone: the runs of the first protocol alone; None without any.
        tried: the settings, in the order in which they were tried.
        seeds: of the runs of each setting.
        folder: with a folder a run, the table, and timing.toml.
        timing: what was found; None if the user has ended the search before.
    """

    first: str
    then: str
    cluster: str
    stop: str
    bisection: Bisection
    alone: Trials | None
    tried: tuple[Trials, ...]
    seeds: tuple[int, ...]
    folder: Path
    timing: SwitchTiming | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the user has ended it."""
        return self.timing is None

    @property
    def fraction(self) -> float | None:
        """Share of the workload under the first protocol that was found, 1 for all of it."""
        return self.timing and self.timing.fraction

    @property
    def speed_up(self) -> float:
        """How many times faster than the first protocol alone the plan that was found is; nan if not measured."""
        found = next((each for each in self.tried if each.fraction == self.fraction), None)
        if self.fraction == 1:
            return 1.0
        return self.alone.mean_s / found.mean_s if self.alone and found else nan

    @property
    def cost_s(self) -> float:
        """Seconds of all runs together, those of the first protocol alone included."""
        return sum(sum(each.times_s) for each in self._all)

    @property
    def cost(self) -> float:
        """The same in runs of the first protocol alone; nan if there were none."""
        return self.cost_s / self.alone.mean_s if self.alone else nan

    @property
    def _all(self) -> list[Trials]:
        return [*([self.alone] if self.alone else []), *self.tried]

    def relative_time(self, trials: Trials) -> float:
        """Return the mean time of a setting as a multiple of that of the first protocol alone; nan if unknown."""
        return trials.mean_s / self.alone.mean_s if self.alone else nan

    def is_accepted(self, trials: Trials) -> bool:
        """Return whether a setting keeps the accuracy."""
        return self.bisection.accepts(trials.accuracies)

    def text(self) -> str:
        """Return the table for people, 80 columns wide."""
        searched, bounds = self.bisection, "+-" if self.bisection.two_sided else "-"
        asked = f"{self.first}, then {self.then}, on {self.cluster}: mean accuracy {searched.target:.4f} {bounds} "
        lines = [fill(f"{asked}{searched.margin:g} to be kept, by {len(self.seeds)} runs.", WIDTH), "", _HEADINGS]
        lines += [self._line(each) for each in self._all]
        return "".join(f"{line}\n" for line in [*lines, "", *self._verdict()])

    def _line(self, trials: Trials) -> str:
        kept = NONE if trials is self.alone else "yes" if self.is_accepted(trials) else "no"
        share = f"{100 * trials.fraction:.6g}%"
        seconds, relative = _number(trials.mean_s), _number(self.relative_time(trials))
        return f"{share:>10}  {_spread(trials):<36}  {seconds:>8}  {relative:>10}  {kept:>6}"

    def _verdict(self) -> list[str]:
        cost = "" if isnan(self.cost) else f", as much as {_number(self.cost)} runs of {self.first} alone"
        told = [fill(f"All runs together took {_number(self.cost_s)} s{cost}.", WIDTH)]
        if self.fraction is None:
            return ["The search was interrupted.", *told]
        if self.fraction == 1:
            return [fill(f"No switch kept the accuracy: stay with {self.first} to the end.", WIDTH), *told]
        gain = "" if isnan(self.speed_up) else f", {self.speed_up:.2f} x faster than {self.first} alone"
        found = f"Found: {self.first} for {100 * self.fraction:.6g}% of the workload, then {self.then}{gain}."
        return [fill(found, WIDTH), *told]

    def to_toml(self) -> str:
        """Return the file that `sync_switch(timing=FILE)` reads, with every trial."""
        return HEADER + tomli_w.dumps(self.as_table())

    def as_table(self) -> dict[str, Any]:
        """Return all that was asked and found in plain values; the accuracy of a run that diverged is nan."""
        searched = self.bisection
        asked = {"target": searched.target, "margin": searched.margin, "two_sided": searched.two_sided}
        table = {**(self.timing.as_table() if self.timing else {}), **asked}
        table |= {"cluster": self.cluster, "stop": self.stop, "seeds": list(self.seeds)}
        table |= {"cost_s": self.cost_s, "cost_in_first_runs": self.cost, "speed_up": self.speed_up}
        alone = {"first_alone": _plain(self.alone)} if self.alone else {}
        return {
            **table,
            **alone,
            "trials": [_plain(each) | {"accepted": self.is_accepted(each)} for each in self.tried],
        }


_HEADINGS = f"{'share of':>10}  {'':<36}  {'':>8}  {'of the':>10}  {'':>6}\n" + (
    f"{'the first':>10}  {'accuracy at the end':<36}  {'seconds':>8}  {'first one':>10}  {'kept':>6}"
)


def _plain(trials: Trials) -> dict[str, Any]:
    return {
        "fraction": trials.fraction,
        "accuracies": list(trials.accuracies),
        "times_s": list(trials.times_s),
        "mean_s": trials.mean_s,
    }


def _spread(trials: Trials) -> str:
    accuracies: Sequence[float] = trials.accuracies
    if trials.diverged:
        return f"{trials.diverged} of {len(accuracies)} diverged"
    around = f" ({min(accuracies):.4f} to {max(accuracies):.4f})" if len(accuracies) > 1 else ""
    return f"{mean(accuracies):.4f}{around}"


def _number(value: float) -> str:
    return NONE if isnan(value) else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
