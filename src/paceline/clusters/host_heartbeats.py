"""Heartbeats of the other hosts of a run: which of them are silent."""

from __future__ import annotations

from collections.abc import Collection, Mapping

HEARTBEAT_S = 1.0  # between two of a host
SILENCE_S = 10.0  # after which its ranks count as lost


class HostHeartbeats:
    """Account of the hosts that have sent heartbeats.

    >>> heartbeats = HostHeartbeats()
    >>> heartbeats.silent({1: 5, 2: 0}, {1, 2}, now=0.0), heartbeats.silent({1: 5, 2: 0}, {1, 2}, now=10.0)
    ([], [1])
    """

    def __init__(self) -> None:
        self._changes: dict[int, tuple[int, float]] = {}  # of each host: number of heartbeats, and when it has changed

    def silent(self, heartbeats: Mapping[int, int], living: Collection[int], now: float) -> list[int]:
        """Return the hosts that have begun, and have been silent for `SILENCE_S`.

        The silence of a host begins anew when its first rank is back: ranks may be faster than their launcher, whose
        first heartbeat comes after its import of torch.

        Args:
            heartbeats: number of heartbeats of each host so far, >= 0.
            living: hosts of which a rank lives.
            now: time in seconds.
        """
        for host, count in heartbeats.items():
            if count and (host not in living or self._changes.get(host, (0, now))[0] != count):
                self._changes[host] = count, now
        return [host for host, (_, changed_s) in self._changes.items() if now - changed_s >= SILENCE_S]
