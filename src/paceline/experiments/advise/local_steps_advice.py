"""Local steps in `advise`: the time per minibatch for each number H of them, as values and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.utils.text_table import TextTable, number

SUFFICIENT_SHARE = 0.9  # of the largest speed-up
NOT_PREDICTED = (
    "Local steps change the loss after equal samples, which these times do not predict: train both, and compare the "
    "losses."
)


class LocalStepsTime(NamedTuple):
    """Predicted time per minibatch with one number of local steps.

    Attributes:
        H: number of local steps, >= 1; 1 for none.
        protocol: text of the protocol with these local steps.
        seconds_per_minibatch: T(H), simulated seconds per minibatch that enters an update, > 0.
        vectors_per_minibatch: number of vectors of the parameters' size that all workers send and receive for a
            minibatch: gradients and versions, or the parts of a ring all-reduce.
    """

    H: int
    protocol: str
    seconds_per_minibatch: float
    vectors_per_minibatch: float


def sufficient_local_steps(seconds: Mapping[int, float], share: float = SUFFICIENT_SHARE) -> int:
    """Smallest number of local steps with most of the possible speed-up.

    ``min {H: T(1) / T(H) >= share max_h T(1) / T(h)}``

    With constant times, T(H) = (pull + H compute + push) / H. So a worker with this H computes for about this share of
    its time, and H = 1 is sufficient if transfers take less than the rest.

    Args:
        seconds: T(H) by H, each > 0.
        share: part of the largest speed-up that is sufficient, in (0, 1].

    >>> sufficient_local_steps({H: (0.5 + H) / H for H in (1, 2, 4, 8, 16, 32, 64, 128, 256)})
    8
    """
    shortest_s = min(seconds.values())
    return min(H for H, each_s in seconds.items() if share * each_s <= shortest_s)


@dataclass(frozen=True, kw_only=True)
class LocalStepsAdvice:
    """Prediction whether fewer, larger messages would pay, for one protocol.

    Attributes:
        protocol: text of the protocol without local steps.
        times: times for H = 1, 2, 4 ... 256, and for each H that was asked for, in ascending order.
        transfer_share: share of pulls and pushes, or of the sum, in a round trip without local steps, 0 to 1.
        payload_bytes: bytes of the parameters, and of a gradient; None if the recording does not have them.
    """

    protocol: str
    times: Sequence[LocalStepsTime]
    transfer_share: float
    payload_bytes: float | None = None

    @property
    def best(self) -> LocalStepsTime:
        """Times of the smallest H with 90 % of the largest speed-up; H = 1 if local steps would not pay."""
        H = sufficient_local_steps({each.H: each.seconds_per_minibatch for each in self.times})
        return next(each for each in self.times if each.H == H)

    @property
    def pays(self) -> bool:
        """Whether local steps save more than 10 % of the time per minibatch."""
        return self.best.H > 1

    def speed_up(self, time: LocalStepsTime) -> float:
        """Return T(1) / T(H)."""
        return self.times[0].seconds_per_minibatch / time.seconds_per_minibatch

    def grids(self) -> list[TextTable]:
        """Return the table of the times; none if local steps would not pay."""
        if not self.pays:
            return []
        columns = len(_HEAD) - (self.payload_bytes is None)
        return [TextTable(_HEAD[:columns], [self._row(each)[:columns] for each in self.times])]

    def sentences(self) -> list[str]:
        """Return whether local steps would pay, the reason, and what is not predicted."""
        transfers = f"transfers take {self.transfer_share:.1%} of a round trip of {self.protocol}"
        if not self.pays:
            saved = max(1 - 1 / self.speed_up(each) for each in self.times)
            return [f"Local steps would not pay: {transfers}, and at most {saved:.1%} of its time would be saved."]
        best = self.best
        larger = " A larger H may save more." if best is self.times[-1] else ""
        gain = (
            f"{best.protocol}: {self.speed_up(best):.2f} x the minibatches per second of {self.protocol}, with the "
            f"smallest H that has {SUFFICIENT_SHARE:.0%} of the largest speed-up.{larger}"
        )
        reason = f"T{transfers[1:]}; any other saving is less waiting for other workers."
        return [gain, reason, NOT_PREDICTED]

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        times = [
            {**each._asdict(), "speed_up": self.speed_up(each), "bytes_per_minibatch": self._bytes(each)}
            for each in self.times
        ]
        return {
            "protocol": self.protocol,
            "best": self.best.protocol,
            "transfer_share": self.transfer_share,
            "times": times,
        }

    def _bytes(self, time: LocalStepsTime) -> float | None:
        return None if self.payload_bytes is None else time.vectors_per_minibatch * self.payload_bytes

    def _row(self, time: LocalStepsTime) -> list[str]:
        sent_bytes = self._bytes(time)
        return [
            time.protocol,
            f"{time.seconds_per_minibatch:.4g}",
            f"{self.speed_up(time):.2f}",
            f"{time.vectors_per_minibatch:.3g}",
            number(sent_bytes and sent_bytes / 1e3),
        ]


_HEAD = ("protocol", "s per\nminibatch", "speed-up", "vectors per\nminibatch", "KB per\nminibatch")
