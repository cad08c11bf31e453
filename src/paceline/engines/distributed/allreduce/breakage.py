"""Breakage: which members of a group can no longer sum, and why."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer


class Breakage:
    """Reports that a group can no longer sum.

    Attributes:
        reason: first reason; empty if there is none.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._broken: dict[int, bool] = {}  # whether each worker cannot reach another one

    def add(self, worker: int, reason: str, *, is_unreachable: bool) -> None:
        """Add the report of a worker; what rank 0 itself observes counts only if it cannot reach a member."""
        if worker or is_unreachable:
            self._broken[worker] = is_unreachable
        self.add_reason(worker, reason)

    def add_reason(self, worker: int, reason: str) -> None:
        """Record why a worker can no longer sum, unless another reason is known."""
        self.reason = self.reason or f"worker {worker}: {reason}"

    @property
    def is_known(self) -> bool:
        """Whether a worker has reported one."""
        return bool(self._broken)

    @property
    def is_unreachable(self) -> bool:
        """Whether a worker cannot reach another one."""
        return any(self._broken.values())

    def describe(self, members: Mapping[int, AcceptedPeer]) -> str:
        """Return the message for the user about members that cannot sum though all of them are there."""
        unreachable = [worker for worker, is_unreachable in self._broken.items() if is_unreachable]
        names = [members[worker].name if worker else "worker 0" for worker in sorted(unreachable or self._broken)]
        who = " and ".join(names) if len(names) == 2 else ", ".join(names) or "workers"
        all_ = " all" if len(names) > 2 else ""  # one that reaches the others may wait for them in vain
        return (
            f"{who} do not{all_} reach each other, though they are running ({self.reason}): repair the link between "
            "their hosts, or start them elsewhere; paceline run continues from the last checkpoint in out="
        )
