"""Result of a search for the switch point: its table, and the timing file for later runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import mean
from typing import Any

import tomli_w

from paceline.catalogue.switch_timing import SwitchTiming
from paceline.experiments.switch_point.bisection import Bisection
from paceline.experiments.switch_point.trials import Trials, TrialSpec
from paceline.utils.representation import TableRepresentation
from paceline.utils.text_table import NONE, TextTable
from paceline.utils.wording import counted

HEADER = "# Written by paceline's search for a switch point; used by the protocol sync_switch(timing=FILE).\n\n"


@dataclass(frozen=True, repr=False, kw_only=True)
class SwitchSearch(TableRepresentation):
    """Search for the time to switch from one protocol to another.

    Attributes:
        trial: common settings of the runs.
        bisection: target and rule of acceptance.
        seeds: seeds of the runs of each setting.
        folder: folder with a folder per run, the table, and timing.toml.
        alone: runs of the first protocol alone; None without any.
        tried: settings in the order of the search.
        timing: result; None before the end of the search.
    """

    trial: TrialSpec
    bisection: Bisection
    seeds: tuple[int, ...]
    folder: Path
    alone: Trials | None = None
    tried: tuple[Trials, ...] = ()
    timing: SwitchTiming | None = None

    @property
    def next_fraction(self) -> float | None:
        """Next fraction to try; None after the last setting."""
        return self.bisection.next_fraction([(each.fraction, each.accuracies) for each in self.tried])

    @property
    def smallest(self) -> float:
        """Smallest share that was accepted so far; 1 if none was."""
        return self.bisection.found([(each.fraction, each.accuracies) for each in self.tried])

    @property
    def interrupted(self) -> bool:
        """Whether the user interrupted the search."""
        return self.timing is None

    @property
    def fraction(self) -> float | None:
        """Share of the workload under the first protocol, in (0, 1]; None before the end of the search."""
        return self.timing.fraction if self.timing else None

    @property
    def speed_up(self) -> float:
        """Speed-up of the resulting plan over the first protocol alone; nan if not measured."""
        found = next((each for each in self.tried if each.fraction == self.fraction), None)
        if self.fraction == 1:
            return 1.0
        return self.alone.mean_s / found.mean_s if self.alone and found else nan

    @property
    def cost_s(self) -> float:
        """Seconds of all runs together, including those of the first protocol alone."""
        return sum(sum(each.times_s) for each in self._all)

    @property
    def cost(self) -> float:
        """Cost in runs of the first protocol alone; nan if there were none."""
        return self.cost_s / self.alone.mean_s if self.alone else nan

    @property
    def _all(self) -> list[Trials]:
        return [*([self.alone] if self.alone else []), *self.tried]

    def relative_time(self, trials: Trials) -> float:
        """Return the mean time of a setting relative to the first protocol alone; nan if unknown."""
        return trials.mean_s / self.alone.mean_s if self.alone else nan

    def is_accepted(self, trials: Trials) -> bool:
        """Return whether a setting keeps the accuracy."""
        return self.bisection.accepts(trials.accuracies)

    def _facts(self) -> Mapping[str, object]:
        facts = {"first": self.trial.first, "then": self.trial.then, "fraction": self.fraction}
        return {**facts, "speed_up": self.speed_up, "cost_s": self.cost_s, "folder": self.folder}

    def _title(self) -> str:
        if self.interrupted:
            return ""
        target, margin = self.bisection.target, f"{'+-' if self.bisection.two_sided else '-'} {self.bisection.margin:g}"
        rule = f"target mean accuracy {target:.4f} {margin}, {counted(len(self.seeds), 'run')} per switch point"
        return f"{self.trial.first}, then {self.trial.then}, on {self.trial.config.cluster}: {rule}."

    def _grids(self) -> list[TextTable]:
        """Return the table of the settings; empty if the search was interrupted."""
        return [] if self.interrupted else [TextTable(_HEADINGS, [self._row(each) for each in self._all], left=(1,))]

    def _row(self, trials: Trials) -> list[str]:
        kept = NONE if trials is self.alone else "yes" if self.is_accepted(trials) else "no"
        share, relative = f"{100 * trials.fraction:.6g}%", _number(self.relative_time(trials))
        return [share, _spread(trials), _number(trials.mean_s), relative, kept]

    def _notes(self) -> list[str]:
        first, share, cost = self.trial.first, 100 * (self.fraction or 0), ""
        if not isnan(self.cost):
            runs = _number(self.cost)
            cost = f", as much as {runs} {'run' if runs == '1' else 'runs'} of {first} alone"
        gain = "" if isnan(self.speed_up) else f", {self.speed_up:.2f} x faster than {first} alone"
        found = f"Found: {first} for {share:.6g}% of the workload, then {self.trial.then}{gain}."
        if self.fraction is None:
            found = "The search was interrupted."
        elif self.fraction == 1:
            found = f"No switch point kept the accuracy: use {first} to the end."
        return [found, f"All runs together took {_number(self.cost_s)} s{cost}."]

    def to_toml(self) -> str:
        """Return the content of the file for ``sync_switch(timing=FILE)``, with every trial."""
        return HEADER + tomli_w.dumps(self.as_table())

    def as_table(self) -> dict[str, Any]:
        """Return the settings and results in plain values; the accuracy of a run that diverged is nan."""
        rule = self.bisection
        table = self.timing.as_table() if self.timing else {}
        table |= {"target": rule.target, "margin": rule.margin, "two_sided": rule.two_sided}
        table |= {
            "cluster": str(self.trial.config.cluster),
            "stop": str(self.trial.config.stop),
            "seeds": list(self.seeds),
        }
        table |= {"cost_s": self.cost_s, "cost_in_first_runs": self.cost, "speed_up": self.speed_up}
        table |= {"first_alone": _plain(self.alone)} if self.alone else {}
        return table | {"trials": [_plain(each) | {"accepted": self.is_accepted(each)} for each in self.tried]}


_HEADINGS = ("share of\nthe first", "accuracy at the end", "seconds", "of the\nfirst one", "kept")


def _plain(trials: Trials) -> dict[str, Any]:
    numbers = {"accuracies": list(trials.accuracies), "times_s": list(trials.times_s)}
    return {"fraction": trials.fraction, **numbers, "mean_s": trials.mean_s}


def _spread(trials: Trials) -> str:
    accuracies: Sequence[float] = trials.accuracies
    if trials.diverged:
        return f"{trials.diverged} of {len(accuracies)} diverged"
    around = f" ({min(accuracies):.4f} to {max(accuracies):.4f})" if len(accuracies) > 1 else ""
    return f"{mean(accuracies):.4f}{around}"


def _number(value: float) -> str:
    return NONE if isnan(value) else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
