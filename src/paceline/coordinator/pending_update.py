"""Update in progress: its gradients, its quorum, and the workers that it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, ClassVar

from paceline.core.events import Accept
from paceline.protocols.protocol import Protocol
from paceline.utils.state_dict import Stateful


class PendingUpdate(Stateful):
    """Collects gradients until its quorum, min(K, held + workers that can still contribute), is reached.

    The effective quorum is never computed. An update is due when K gradients are held, or when gradients are held
    and no contributing worker is busy.

    Attributes:
        held: accepted gradients, in the order of their arrival.
        quorum: number of gradients to wait for; inf for one of every worker.
        reason: reason on record when the quorum is reached.
        opened_s: time at which the update was opened, in seconds.
        joining: workers that have joined since then; the update does not wait for them.
        awaited: workers that must still contribute, if the quorum is all workers; else empty.
        skipped: reason why no gradient of this update counts, and its minibatches; None if its gradients count.
    """

    _saved = (
        "held",
        "quorum",
        "reason",
        "opened_s",
        "joining",
        "awaited",
        "_of_protocol",
        "_closed_because",
        "_is_scaled",
        "skipped",
    )
    _defaults: ClassVar[Mapping[str, Any]] = {"skipped": None}  # missing in early runs

    def __init__(self) -> None:
        self.held: list[Accept] = []
        self.quorum: float = inf
        self.reason = ""
        self.opened_s = 0.0
        self.joining: set[int] = set()
        self.awaited: set[int] = set()
        self.skipped: tuple[str, int] | None = None
        self._of_protocol = (self.quorum, self.reason)
        self._closed_because = ""
        self._is_scaled = False  # whether a held gradient has a step scale

    def follow(self, protocol: Protocol, workers: Iterable[int]) -> None:
        """Wait for the quorum of this protocol from now on; if that is all workers, for these without joining ones."""
        self._of_protocol = _quorum(protocol)
        self.quorum, self.reason = self._of_protocol
        self.awaited = set(workers) - self.joining if self.quorum == inf else set()

    def check_quorum(self, protocol: Protocol) -> None:
        """Check that a state that was loaded can reach its quorum: else a run would wait for ever.

        Raises:
            ValueError: its quorum is not that of its protocol, or no number of gradients.
        """
        if self._of_protocol != _quorum(protocol) or not self.quorum >= 1:
            raise ValueError(f"a quorum of {self._of_protocol[0]} or {self.quorum} under {protocol}")

    def open(self, now: float) -> None:
        """Open an update with the quorum of the protocol."""
        self.opened_s = now
        self.quorum, self.reason = self._of_protocol

    def wait_for(self, workers: Iterable[int]) -> None:
        """Await these busy workers, if the quorum is all workers."""
        if self.quorum == inf:
            self.awaited = set(workers) - self.joining
        elif self.awaited:
            self.awaited = set()

    def wait_again(self, worker: int) -> None:
        """Await a worker that has work again, if the quorum is all workers and it has not joined during the update."""
        if self.quorum == inf and worker not in self.joining:
            self.awaited.add(worker)

    def change_quorum(self, k: int, reason: str) -> None:
        """Wait for k gradients in this update only."""
        self.quorum = k
        self.reason = f"quorum of {k} reached: {reason}"

    def close(self, reason: str) -> None:
        """Make the update now, if a gradient is held."""
        self._closed_because = reason if self.held else ""

    def hold(self, gradient: Accept) -> None:
        """Add an accepted gradient."""
        self.held.append(gradient)
        if gradient.step_scale != 1.0:
            self._is_scaled = True
        self.awaited.discard(gradient.worker)

    def skip(self, reason: str, minibatches: int) -> None:
        """Drop the held gradients, and let the update change nothing.

        Args:
            reason: reason for the log.
            minibatches: number of minibatches whose samples count as used.
        """
        self.held = []
        self._is_scaled = False
        self._closed_because = ""
        self.skipped = reason, minibatches

    def leave(self, worker: int) -> None:
        """Stop waiting for a worker."""
        self.awaited.discard(worker)
        self.joining.discard(worker)

    def due(self) -> str:
        """Return the reason why the update is due, or an empty string."""
        held = len(self.held)
        # The effective quorum changes with every event, so it is never computed (decision 0002).
        if held >= self.quorum or self._closed_because or (held and self.quorum == inf and not self.awaited):
            return self._closed_because or self.reason
        return ""

    def take(self) -> tuple[tuple[Accept, ...], float]:
        """Remove the held gradients; return them and their mean step scale by their weights."""
        held = tuple(self.held)
        scale = _mean_step_scale(held) if self._is_scaled else 1.0
        self.held = []
        self._is_scaled = False
        self._closed_because = ""
        return held, scale


def _quorum(protocol: Protocol) -> tuple[float, str]:
    if protocol.quorum == "all":
        return inf, "every live worker has contributed"
    return protocol.quorum, f"quorum of {protocol.quorum} reached"


def _mean_step_scale(gradients: tuple[Accept, ...]) -> float:
    if len(gradients) == 1:
        return gradients[0].step_scale
    return sum(each.weight * each.step_scale for each in gradients) / sum(each.weight for each in gradients)
