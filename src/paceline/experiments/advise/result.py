"""Result of `advise`: ranked predictions, as values and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, isnan
from typing import Any, NamedTuple

from paceline.recording.run_folder import plain
from paceline.utils.representation import TableRepresentation
from paceline.utils.text_table import TextTable
from paceline.utils.wording import counted

PARTS = 5  # parts of a run with a prediction each, for the uncertainty


class Prediction(NamedTuple):
    """Predicted time of one protocol to the progress of the run.

    Attributes:
        protocol: text of the protocol.
        seconds_per_update: simulated seconds per update, > 0.
        gradients_per_s: simulated gradients per second that enter updates.
        staleness: simulated mean staleness of its gradients, versions.
        updates: predicted number of updates; inf if it would not get there, nan without gradients.
        seconds: predicted seconds, the product of both, by which protocols are ranked.
        low_s: smallest of five predictions in seconds, each with the noise of one fifth of the run and the times of the
            other four.
        high_s: largest of the five predictions in seconds.
        wins: number of the five predictions in which the protocol is best, 0 to 5.
    """

    protocol: str
    seconds_per_update: float
    gradients_per_s: float
    staleness: float
    updates: float
    seconds: float
    low_s: float
    high_s: float
    wins: int


@dataclass(frozen=True)
class GradientSummary:
    """Statistics of the gradients of a run.

    Attributes:
        loss: losses before the first and after the last update.
        noise: variance of a gradient over the squared norm of the gradient of the loss, V / N.
        curvature: curvature h of the loss in the directions of the noise.
    """

    loss: tuple[float, float]
    noise: float
    curvature: float


@dataclass(frozen=True, repr=False)
class Advice(TableRepresentation):
    """Ranking of protocols by predicted time, with the statistics behind it.

    Attributes:
        ranking: predictions, the fastest first; for a trace by seconds per update.
        seen: statistics of the gradients of the run; None for a trace, which has no gradients.
    """

    ranking: Sequence[Prediction]
    seen: GradientSummary | None

    @property
    def best(self) -> Prediction:
        """Prediction of the fastest protocol."""
        return self.ranking[0]

    def _facts(self) -> Mapping[str, object]:
        return {"best": self.best.protocol, "protocols": len(self.ranking), "seen": self.seen}

    def _grids(self) -> list[TextTable]:
        return [TextTable(_HEAD, [_row(each) for each in self.ranking])]

    def _notes(self) -> list[str]:
        """Return sentences on the best protocol, the reason, and the uncertainty."""
        if self.seen is None:
            return self._verdict_of_times()
        before, after = self.seen.loss
        why = (
            f"Loss {before:.3g} to {after:.3g}. A gradient's variance is {self.seen.noise:.3g} |grad|^2, the curvature "
            f"{self.seen.curvature:.2g}."
        )
        best = self.best
        if not isfinite(best.seconds):
            return [why, "No protocol would make this progress at this learning rate; lower the learning rate."]
        if not best.seconds:
            return [why, f"{best.protocol} gains more by less noise than the run made progress; record a longer run."]
        others = [each for each in self.ranking[1:] if isfinite(each.seconds)]
        lead = f", {others[0].seconds / best.seconds:.2f} x faster than {others[0].protocol}" if others else ""
        updates = counted(float(f"{best.updates:.3g}"), "update")
        return [
            why,
            f"{best.protocol}: {updates} of {best.seconds_per_update:.3g} s{lead}.",
            f"It is the best in {best.wins} of {PARTS} predictions, each from the gradients of one fifth of the run.",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return plain values, with None for nan and inf."""
        ranking = [plain(each._asdict()) for each in self.ranking]
        return {"ranking": ranking, "seen": self.seen and asdict(self.seen)}

    def _verdict_of_times(self) -> list[str]:
        most = max(self.ranking, key=lambda each: each.gradients_per_s)
        return [
            "A trace has times but no gradients, so the number of updates of each protocol is unknown.",
            f"If gradients have little noise: {self.best.protocol}, the shortest update.",
            f"If noise dominates: {most.protocol}, {most.gradients_per_s:.3g} gradients/s.",
            "To find out, record a run with measure_steps=True.",
        ]


_HEAD = ("protocol", "s/update", "gradients/s", "staleness", "updates", "seconds", "low..high")


def _row(each: Prediction) -> list[str]:
    times = [each.protocol, f"{each.seconds_per_update:.4g}", f"{each.gradients_per_s:.4g}", f"{each.staleness:.3g}"]
    if isnan(each.seconds):
        return [*times, "", "", ""]
    if not isfinite(each.seconds):
        return [*times, "never", "never", ""]
    return [*times, f"{each.updates:.4g}", f"{each.seconds:.4g}", f"{each.low_s:.3g}..{each.high_s:.3g}"]
