"""Result of `advise` for a DDP recording, as values and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.ddp_recording.recording import DDPRecording
from paceline.ddp_recording.waiting import StragglerFacts, TimeShares
from paceline.experiments.advise.evidence import Evidence
from paceline.experiments.advise.local_steps_advice import LocalStepsAdvice
from paceline.experiments.advise.recorded_noise import NoiseScale
from paceline.experiments.advise.result import AutoChoice, choice_sentence
from paceline.experiments.advise.shares_prediction import SharesPrediction
from paceline.recording.run_folder import plain
from paceline.utils.representation import TableRepresentation
from paceline.utils.text_table import TextTable
from paceline.utils.wording import counted

SECONDS_PER_HOUR = 3600
NOTABLE_SUM = 0.2  # share of the time in sums from which the network is worth a sentence
NAMED = 4  # stragglers that get a sentence
AT_PART = {"data": "outside forward and backward (data, optimizer)", "forward": "in forward", "backward": "in backward"}


COARSE = (
    "The script made no DDP model, so these times are those of all its collectives, from the flight recorder of torch. "
    "They are coarser: collectives that overlap computing count as waiting, the part of a step and the load of links "
    "are unknown, and clocks of hosts were compared."
)


ON_DEVICE = (
    "The model is not on a CPU: forward, backward and sums are those of every tenth step, from the timers of DDP on "
    "the device, and the broadcast of buffers counts as forward. These timers have not been tried on a GPU."
)


class DDPPrediction(NamedTuple):
    """Predicted time of one protocol on the recorded ranks.

    Attributes:
        protocol: text of the protocol, or of DDP as recorded.
        seconds_per_update: seconds per update, > 0.
        gradients_per_s: gradients per second that enter updates.
        staleness: mean staleness of its gradients, versions.
        link_bits_per_s: load of the busiest link in its busier direction: the server's, or one of DDP's ring.
        seconds: seconds to the loss that the recorded run reached; nan without sampled gradients.
        low_s: smallest prediction of these seconds.
        high_s: largest prediction of these seconds.
    """

    protocol: str
    seconds_per_update: float
    gradients_per_s: float
    staleness: float
    link_bits_per_s: float
    seconds: float
    low_s: float
    high_s: float


@dataclass(frozen=True, repr=False, kw_only=True)
class RecordingAdvice(TableRepresentation):
    """Waiting and stragglers of a DDP recording, with predictions for other protocols.

    Attributes:
        recording: recording behind the numbers.
        shares: use of the rank-time.
        stragglers: slow ranks, the most expensive first.
        ranking: predictions, the fastest first; by seconds per update if no gradients were sampled.
        noise: noise of the gradients; None if too few were sampled.
        auto: choice of `auto` with lr_rule="noise"; None if too few gradients were sampled.
        price: price of a worker-hour, >= 0; None if not given.
        evidence: comparison with DDP on the cluster that is nearest to the recorded one.
        local_steps: times per minibatch with local steps, of the protocols that were given with local steps, or else of
            all-reduce.
        balanced: times with shares of the batch by speed; None if they are not among the protocols.
        queue: times with leases from a queue; None if they are not among the protocols.
    """

    recording: DDPRecording
    shares: TimeShares
    stragglers: Sequence[StragglerFacts]
    ranking: Sequence[DDPPrediction]
    noise: NoiseScale | None
    auto: AutoChoice | None = None
    price: float | None = None
    evidence: Evidence | None = None
    local_steps: Sequence[LocalStepsAdvice] = ()
    balanced: SharesPrediction | None = None
    queue: SharesPrediction | None = None

    @property
    def waiting_hours(self) -> float:
        """Rank-hours of waiting."""
        return self.shares.waiting_s / SECONDS_PER_HOUR

    @property
    def waiting_cost(self) -> float | None:
        """Price of the rank-hours of waiting; None without a price."""
        return None if self.price is None else self.waiting_hours * self.price

    def as_json(self) -> dict[str, Any]:
        """Return plain values, with None for nan and inf."""
        return {
            "folder": str(self.recording.path),
            "ranks": self.recording.ranks,
            "hosts": sorted({header.host for header in self.recording.headers}),
            "steps": self.recording.steps,
            "payload_bytes": self.recording.payload_bytes,
            "shares": {**plain(self.shares._asdict()), "waiting_share": self.shares.waiting_share},
            "waiting_hours": self.waiting_hours,
            "waiting_cost": self.waiting_cost,
            "stragglers": [{**each._asdict(), "is_persistent": each.is_persistent} for each in self.stragglers],
            "auto": self.auto and plain(self.auto._asdict()),
            "evidence": self.evidence and self.evidence._asdict(),
            "noise_scale": None if self.noise is None else plain(self.noise.ratio),
            "ranking": [plain(each._asdict()) for each in self.ranking],
            "local_steps": [each.as_json() for each in self.local_steps],
            "balanced": self.balanced and self.balanced.as_json(),
            "queue": self.queue and self.queue.as_json(),
        }

    def _facts(self) -> Mapping[str, object]:
        return {
            "folder": self.recording.path,
            "waiting share": self.shares.waiting_share,
            "stragglers": [each.rank for each in self.stragglers],
            "best": self.ranking[0].protocol,
        }

    def _title(self) -> str:
        read, shares = self.recording, self.shares
        hosts = len({header.host for header in read.headers})
        cost = "" if self.waiting_cost is None else f", which cost {self.waiting_cost:.4g}"
        total_h = shares.total_s / SECONDS_PER_HOUR
        return (
            f"{read.path}: {counted(read.steps, 'step')} of {counted(read.ranks, 'rank')} on {counted(hosts, 'host')}, "
            f"{read.step_s.mean():.4g} s each. {shares.waiting_share:.1%} of the rank-time was waiting for slower "
            f"ranks: {self.waiting_hours:.3g} of {total_h:.3g} rank-hours{cost}. "
            f"{shares.summing_s / shares.total_s:.1%} was communication."
        )

    def _grids(self) -> list[TextTable]:
        columns = _TIMES - self.recording.is_coarse if self.noise is None else len(_HEAD)
        ranking = TextTable(_HEAD[:columns], [_row(each)[:columns] for each in self.ranking])
        return [ranking, *(grid for each in self.local_steps for grid in each.grids())]

    def _notes(self) -> list[str]:
        local_steps = [sentence for each in self.local_steps for sentence in each.sentences()]
        if self.recording.is_coarse:
            return [*self._straggler_notes(), *local_steps, COARSE]
        devices = {model.device for header in self.recording.headers for model in header.models}
        on_device = [ON_DEVICE] if any(not device.startswith("cpu") for device in devices) else []
        evidence = [self.evidence.sentence] if self.evidence else []
        return [
            *on_device,
            *self._straggler_notes(),
            *([self.balanced.sentence] if self.balanced else []),
            *([self.queue.compared_with(self.balanced)] if self.queue else []),
            *self._noise_notes(),
            *self._link_notes(),
            *local_steps,
            *evidence,
        ]

    def _straggler_notes(self) -> list[str]:
        if not self.stragglers:
            return ["No rank was slow: none exceeded the others by a fifth in 1 % of the steps or more."]
        return [straggler_sentence(each) for each in self.stragglers[:NAMED]]

    def _noise_notes(self) -> list[str]:
        if self.noise is None:
            text = (
                "Too few gradients were sampled to predict the time to a loss, so the table is sorted by seconds per "
                "update. Record a longer run, or with sample=10."
            )
        else:
            text = (
                'seconds: predicted time to the loss that the run reached, with lr_rule="noise" or a learning rate '
                f"that is tuned for each protocol. A gradient's variance is {self.noise.ratio:.3g} |grad|^2. "
                "low..high: from the noise of each fifth of the run and the times of the other four."
            )
        return [text, *self._optimizer_notes(), *([choice_sentence(self.auto)] if self.auto else [])]

    def _optimizer_notes(self) -> list[str]:
        optimizer = self.recording.headers[0].optimizer
        if optimizer is None:
            return ["The recording lacks the optimizer: stale gradients cost as much as without momentum."]
        if not optimizer.momentum:
            return []
        name = "beta1" if optimizer.is_adaptive else "momentum"
        return [f"Stale gradients cost as much as with {optimizer.name} and {name} {optimizer.momentum:g}."]

    def _link_notes(self) -> list[str]:
        slow = "The network is slow: sums take a large share of the time even if no rank is late."
        load = (
            "link: load of the server's link, which carries every gradient and every version; a link of DDP's ring "
            "carries less. Predictions assume that a pull and a push take half of DDP's sum each: if the server's "
            "link is slower than this load, use shards."
        )
        return [*([slow] if self.shares.summing_s > NOTABLE_SUM * self.shares.total_s else []), load]


def straggler_sentence(straggler: StragglerFacts) -> str:
    """Return what is known of a slow rank as a sentence."""
    kind = "persistent" if straggler.is_persistent else f"transient, {counted(straggler.episodes, 'episode')}"
    where = AT_PART.get(straggler.part)
    part = "" if where is None else f", {1e3 * straggler.part_excess_s:.3g} ms of it {where}"
    return (
        f"rank {straggler.rank} on {straggler.host} is slow in {straggler.steps_share:.1%} of the steps ({kind}): "
        f"{1e3 * straggler.excess_s:.3g} ms more than the others{part}. "
        f"Without it a step would take {1e3 * straggler.cost_s:.3g} ms less on average."
    )


_HEAD = ("protocol", "s per\nupdate", "gradients\nper s", "stale-\nness", "link\nGbit/s", "seconds", "low..high")
_TIMES = len(_HEAD) - 2  # columns without the seconds to a loss
_BITS = 1e9


def _row(each: DDPPrediction) -> list[str]:
    times = [each.protocol, f"{each.seconds_per_update:.4g}", f"{each.gradients_per_s:.4g}", f"{each.staleness:.3g}"]
    return [
        *times,
        f"{each.link_bits_per_s / _BITS:.3g}",
        f"{each.seconds:.4g}",
        f"{each.low_s:.3g}..{each.high_s:.3g}",
    ]
