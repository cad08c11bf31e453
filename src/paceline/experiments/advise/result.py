"""Result of `advise`: ranked predictions, as values and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, isnan, nan
from typing import Any, NamedTuple

from paceline.experiments.advise.evidence import Evidence
from paceline.experiments.advise.local_steps_advice import LocalStepsAdvice
from paceline.recording.run_folder import plain
from paceline.shares.gain import Gain
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
        seconds: predicted seconds, the product of seconds_per_update and updates, by which protocols are ranked.
        low_s: smallest of five predictions in seconds, each with the noise of every fifth update and the times of four
            fifths of the run.
        high_s: largest of the five predictions in seconds.
        wins: number of the five predictions in which the protocol is best, 0 to 5.
        price: price of staleness d of its schedule of updates, >= 1, for the rule "noise".
        progress_per_s: progress S = Lambda / (K d + phi) in a second under the rule "noise", with the phi of the run;
            nan without gradients.
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
    price: float = nan
    progress_per_s: float = nan


class AutoChoice(NamedTuple):
    """Choice of `auto` for the round trips and the gradients of a run.

    Attributes:
        protocol: text of the protocol.
        gradients_per_s: Lambda, accepted gradients per second.
        k: K, gradients of an update on average.
        price: price of staleness d, >= 1.
        phi: critical number of gradients of an update.
        progress_per_s: progress per second S = Lambda / (K d + phi).
    """

    protocol: str
    gradients_per_s: float
    k: float
    price: float
    phi: float
    progress_per_s: float


@dataclass(frozen=True, kw_only=True)
class GradientSummary:
    """Statistics of the gradients of a run.

    Attributes:
        loss: losses before the first and after the last update.
        noise: variance of a gradient over the squared norm of the gradient of the loss, V / N, in the second half of
            the run; nan if the rate followed the rule "noise".
        curvature: curvature h of the loss along the steps; nan if the rate followed the rule "noise".
        phi: critical number of gradients of an update; its mean over the run if the rate followed the rule "noise".
    """

    loss: tuple[float, float]
    noise: float
    curvature: float
    phi: float


@dataclass(frozen=True, repr=False, kw_only=True)
class Advice(TableRepresentation):
    """Ranking of protocols by predicted time, with the statistics behind it.

    Attributes:
        ranking: predictions, the fastest first; for a trace by seconds per update.
        seen: statistics of the gradients of the run; None for a trace, which has no gradients.
        auto: choice of `auto` at the end of the run; None for a trace.
        evidence: comparison with DDP on the cluster that is nearest to the recorded one.
        local_steps: times per minibatch with local steps, of the protocols that were given with local steps, or else of
            the best one.
        gain: what unequal shares have gained, for the run of a script whose ranks share the samples.
    """

    ranking: Sequence[Prediction]
    seen: GradientSummary | None
    auto: AutoChoice | None = None
    evidence: Evidence | None = None
    local_steps: Sequence[LocalStepsAdvice] = ()
    gain: Gain | None = None

    @property
    def best(self) -> Prediction:
        """Prediction of the fastest protocol."""
        return self.ranking[0]

    def _facts(self) -> Mapping[str, object]:
        return {"best": self.best.protocol, "protocols": len(self.ranking), "seen": self.seen}

    def _grids(self) -> list[TextTable]:
        head, row = (_NOISE_HEAD, _noise_row) if self._follows_noise else (_HEAD, _row)
        ranking = TextTable(head, [row(each) for each in self.ranking])
        return [ranking, *(grid for each in self.local_steps for grid in each.grids())]

    @property
    def _follows_noise(self) -> bool:
        """Whether the learning rate of the run followed the rule "noise"."""
        return self.seen is not None and isnan(self.seen.noise)

    def _notes(self) -> list[str]:
        local_steps = [sentence for each in self.local_steps for sentence in each.sentences()]
        return [*self._verdict(), *local_steps, *([self.evidence.sentence] if self.evidence else [])]

    def _verdict(self) -> list[str]:
        """Return sentences on the best protocol, the reason, and the uncertainty."""
        if self.seen is None:
            return self._verdict_of_times()
        before, after = self.seen.loss
        statistics = (
            f"A gradient's variance is {self.seen.noise:.3g} |grad|^2, the curvature {self.seen.curvature:.2g}."
        )
        if self._follows_noise:
            statistics = (
                f"The learning rate followed the noise: S = Lambda / (K d + phi) with phi = {self.seen.phi:.3g}."
            )
        why = f"Loss {before:.3g} to {after:.3g}. {statistics}"
        best = self.best
        if not isfinite(best.seconds):
            never = "No protocol would make this progress at this learning rate; lower the learning rate."
            return [why, never, *([choice_sentence(self.auto)] if self.auto else [])]
        others = [each for each in self.ranking[1:] if isfinite(each.seconds)]
        lead = f", {others[0].seconds / best.seconds:.2f} x faster than {others[0].protocol}" if others else ""
        updates = counted(float(f"{best.updates:.3g}"), "update")
        return [
            why,
            f"{best.protocol}: {updates} of {best.seconds_per_update:.3g} s{lead}.",
            f"It is the best in {best.wins} of {PARTS} predictions, each from the gradients of every fifth update.",
            *([choice_sentence(self.auto)] if self.auto else []),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return plain values, with None for nan and inf."""
        ranking = [plain(each._asdict()) for each in self.ranking]
        seen = self.seen and {name: plain(value) for name, value in asdict(self.seen).items()}
        auto, evidence = (each and plain(each._asdict()) for each in (self.auto, self.evidence))
        local_steps = [each.as_json() for each in self.local_steps]
        return {"ranking": ranking, "seen": seen, "auto": auto, "evidence": evidence, "local_steps": local_steps}

    def _verdict_of_times(self) -> list[str]:
        most = max(self.ranking, key=lambda each: each.gradients_per_s)
        if self.gain is not None:
            return [
                f"Shares of the batch by speed, with the parameters of equal shares: {self.gain}.",
                "Other protocols have other parameters; to try one, attach the loop (paceline.attach).",
            ]
        return [
            "A trace has times but no gradients, so the number of updates of each protocol is unknown.",
            f"If gradients have little noise: {self.best.protocol}, the shortest update.",
            f"If noise dominates: {most.protocol}, {most.gradients_per_s:.3g} gradients/s.",
            "To find out, record a run with measure_steps=True.",
        ]


def choice_sentence(choice: AutoChoice) -> str:
    """Return the choice of `auto` as a sentence."""
    name, gradients_per_s, k, price, phi, progress_per_s = choice
    excess = (gradients_per_s / progress_per_s - k * price) / phi  # see ``NoiseRule.size``
    noise = f"{phi:.3g}" if excess < 1.001 else f"{phi:.3g} x {excess:.3g}"
    return (
        f'auto, with lr_rule="noise", would choose {name}: S = Lambda / (K d + phi) = {gradients_per_s:.3g} / '
        f"({k:.3g} x {price:.3g} + {noise}) = {progress_per_s:.3g} per s."
    )


_HEAD = ("protocol", "s/update", "gradients/s", "staleness", "updates", "seconds", "low..high")
_NOISE_HEAD = ("protocol", "s/update", "gradients/s", "K d", "S per s", "seconds", "low..high")


def _row(each: Prediction) -> list[str]:
    times = [each.protocol, f"{each.seconds_per_update:.4g}", f"{each.gradients_per_s:.4g}", f"{each.staleness:.3g}"]
    if isnan(each.seconds):
        return [*times, "", "", ""]
    if not isfinite(each.seconds):
        return [*times, "never", "never", ""]
    return [*times, f"{each.updates:.4g}", f"{each.seconds:.4g}", f"{each.low_s:.3g}..{each.high_s:.3g}"]


def _noise_row(each: Prediction) -> list[str]:
    return [
        each.protocol,
        f"{each.seconds_per_update:.4g}",
        f"{each.gradients_per_s:.4g}",
        f"{each.gradients_per_s * each.seconds_per_update * each.price:.3g}",
        f"{each.progress_per_s:.3g}",
        f"{each.seconds:.4g}",
        f"{each.low_s:.3g}..{each.high_s:.3g}",
    ]
