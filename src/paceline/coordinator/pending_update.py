"""The update that is open: what it holds, whom it waits for, and when it is due."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from paceline.core.events import Accept
from paceline.protocols.protocol import Protocol
from paceline.utils.state_dict import restore, snapshot


class PendingUpdate:
    """Gathers gradients until its quorum, min(K, held + workers that can still contribute), is reached.

    That sum is never computed: it is reached when K gradients are held, or when something is held and nobody who
    counts is at work.

    Attributes:
        held: gradients accepted for it, in the order of their arrival.
        quorum: gradients that it waits for; inf for one of every worker.
        reason: why it will be made when that many are held.
        opened_s: when it was opened.
        newcomers: workers that joined since then, which are not waited for.
        owing: while all are waited for: who counts and has not contributed yet.
    """

    def __init__(self) -> None:
        self.held: list[Accept] = []
        self.quorum: float = inf
        self.reason = ""
        self.opened_s = 0.0
        self.newcomers: set[int] = set()
        self.owing: set[int] = set()
        self._of_protocol = (self.quorum, self.reason)
        self._closed_because = ""
        self._is_scaled = False  # whether one that is held has a step scale

    def follow(self, protocol: Protocol, workers: Iterable[int]) -> None:
        """Wait for the quorum of this protocol from here on; if that is all, for those of these that were there."""
        self._of_protocol = _quorum(protocol)
        self.quorum, self.reason = self._of_protocol
        self.owing = set(workers) - self.newcomers if self.quorum == inf else set()

    def open(self, now: float) -> None:
        """Begin with the quorum of the protocol."""
        self.opened_s = now
        self.quorum, self.reason = self._of_protocol

    def wait_for(self, workers: Iterable[int]) -> None:
        """Take note of who is at work when it is opened."""
        if self.quorum == inf:
            self.owing = set(workers) - self.newcomers
        elif self.owing:
            self.owing = set()

    def change_quorum(self, k: int, reason: str) -> None:
        """Wait for k gradients this once."""
        self.quorum, self.reason = k, f"quorum of {k} reached: {reason}"

    def close(self, reason: str) -> None:
        """Wait for no more, if anything is held."""
        self._closed_because = reason if self.held else ""

    def hold(self, gradient: Accept) -> None:
        """Take in an accepted gradient."""
        self.held.append(gradient)
        if gradient.step_scale != 1.0:
            self._is_scaled = True
        self.owing.discard(gradient.worker)

    def leave(self, worker: int) -> None:
        """Wait for a worker no longer."""
        self.owing.discard(worker)
        self.newcomers.discard(worker)

    def due(self) -> str:
        """Return why it is to be made, or nothing; workers that turn out unable to contribute are not looked at."""
        held = len(self.held)
        if held >= self.quorum or self._closed_because or (held and self.quorum == inf and not self.owing):
            return self._closed_because or self.reason
        return ""

    def take(self) -> tuple[tuple[Accept, ...], float]:
        """Return what it is made of, and the mean of the step scales, weighted by samples; hold nothing more."""
        held = tuple(self.held)
        scale = _mean_step_scale(held) if self._is_scaled else 1.0
        self.held = []
        self._is_scaled = False
        self._closed_because = ""
        return held, scale

    def state_dict(self) -> dict[str, Any]:
        """Return everything."""
        return snapshot(self, _SAVED)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        restore(self, _SAVED, state)


_SAVED = (
    "held",
    "quorum",
    "reason",
    "opened_s",
    "newcomers",
    "owing",
    "_of_protocol",
    "_closed_because",
    "_is_scaled",
)


def _quorum(protocol: Protocol) -> tuple[float, str]:
    if protocol.quorum == "all":
        return inf, "every live worker has contributed"
    return protocol.quorum, f"quorum of {protocol.quorum} reached"


def _mean_step_scale(gradients: tuple[Accept, ...]) -> float:
    if len(gradients) == 1:
        return gradients[0].step_scale
    return sum(each.samples * each.step_scale for each in gradients) / sum(each.samples for each in gradients)
