"""What `advise` has found, as values and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, isnan
from typing import Any, NamedTuple

from paceline.utils.representation import TableRepresentation
from paceline.utils.text_table import TextTable
from paceline.utils.wording import counted

PARTS = 5  # of a run: each predicts on its own, to see how sure a prediction is


class Prediction(NamedTuple):
    """What one protocol would have done with the progress of the run.

    Attributes:
        protocol: as it would be typed.
        seconds_per_update: simulated.
        gradients_per_s: that enter updates, simulated.
        staleness: mean of its gradients', simulated.
        updates: that it would need; inf if it would not get there, nan if there are no gradients to tell.
        seconds: both together, by which the protocols are ranked.
        low_s: the least seconds of five predictions, each by the noise of a fifth of the run, and the times without it.
        high_s: the most, likewise.
        wins: in how many of them it is the best.
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
class Seen:
    """What the gradients of a run were like.

    Attributes:
        loss: before and after the updates that were looked at.
        noise: V / N, the variance of a gradient over the squared norm of the loss's own.
        curvature: h, in the directions of the noise.
    """

    loss: tuple[float, float]
    noise: float
    curvature: float


@dataclass(frozen=True, repr=False)
class Advice(TableRepresentation):
    """Protocols from the soonest to the latest, and what the prediction rests on.

    Attributes:
        ranking: of all that were asked for; by seconds per update, if there are no gradients to tell more.
        seen: None of a trace, which has no gradients.
    """

    ranking: Sequence[Prediction]
    seen: Seen | None

    @property
    def best(self) -> Prediction:
        """The one that would be there soonest."""
        return self.ranking[0]

    def _facts(self) -> Mapping[str, object]:
        return {"best": self.best.protocol, "protocols": len(self.ranking), "seen": self.seen}

    def _grids(self) -> list[TextTable]:
        return [TextTable(_HEAD, [_row(each) for each in self.ranking])]

    def _notes(self) -> list[str]:
        return self.verdict()

    def verdict(self) -> list[str]:
        """Return the best protocol, why, and how sure that is, in sentences."""
        if self.seen is None:
            return self._verdict_of_times()
        before, after = self.seen.loss
        why = (
            f"Loss {before:.3g} to {after:.3g}. A gradient's variance is {self.seen.noise:.3g} |grad|^2, the curvature "
            f"{self.seen.curvature:.2g}."
        )
        best = self.best
        if not isfinite(best.seconds):
            return [why, "None of them would make this progress at this learning rate; lower it."]
        if not best.seconds:
            return [why, f"{best.protocol} saves more noise than the run made progress; record a longer one."]
        others = [each for each in self.ranking[1:] if isfinite(each.seconds)]
        lead = f", {others[0].seconds / best.seconds:.2f} x sooner than {others[0].protocol}" if others else ""
        updates = counted(float(f"{best.updates:.3g}"), "update")
        return [
            why,
            f"{best.protocol}: {updates} of {best.seconds_per_update:.3g} s{lead}.",
            f"It is the best in {best.wins} of {PARTS} predictions, each by the gradients of another fifth of the run.",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return plain values; what is not a number as None."""
        ranking = [{name: _plain(value) for name, value in each._asdict().items()} for each in self.ranking]
        return {"ranking": ranking, "seen": self.seen and asdict(self.seen)}

    def _verdict_of_times(self) -> list[str]:
        most = max(self.ranking, key=lambda each: each.gradients_per_s)
        return [
            "A trace tells times and no gradients, so how many updates each needs is unknown.",
            f"Where the noise of gradients hardly matters: {self.best.protocol}, the shortest update.",
            f"Where it is all that matters: {most.protocol}, {most.gradients_per_s:.3g} gradients/s.",
            "Which it is, a run tells that was recorded with measure_steps=True.",
        ]


_HEAD = ("protocol", "s/update", "gradients/s", "staleness", "updates", "seconds", "low..high")


def _row(each: Prediction) -> list[str]:
    times = [each.protocol, f"{each.seconds_per_update:.4g}", f"{each.gradients_per_s:.4g}", f"{each.staleness:.3g}"]
    if isnan(each.seconds):
        return [*times, "", "", ""]
    if not isfinite(each.seconds):
        return [*times, "never", "never", ""]
    return [*times, f"{each.updates:.4g}", f"{each.seconds:.4g}", f"{each.low_s:.3g}..{each.high_s:.3g}"]


def _plain(value: Any) -> Any:
    return value if not isinstance(value, float) or isfinite(value) else None
