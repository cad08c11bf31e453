"""Protocols that `auto` chooses from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import inf
from typing import Any

from paceline.protocols.protocol import Protocol

_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "k_sync": {"max_staleness": 0, "refill": "update", "on_update": "interrupt"},
    "pull": {"max_staleness": 0, "refill": "arrival"},
    "k_batch_sync": {"max_staleness": 0, "refill": "arrival", "on_update": "interrupt"},
    "k_async": {"max_staleness": inf, "refill": "update"},
    "k_batch_async": {"max_staleness": inf, "refill": "arrival"},
}


@cache
def default_candidates(n: int) -> tuple[Protocol, ...]:
    """Return the default candidates for n workers: bsp, asp, and five families with some quorums.

    The quorums are 1, 2, 4 ... below n, the largest 3, 6, 12 ... below n, and n where workers are refilled on arrival.
    k_sync also has n - 1, all workers but the slowest.

    >>> default_candidates(2)
    (bsp, asp, k_sync(k=1), pull(k=1), pull(k=2), k_batch_sync(k=2), k_batch_async(k=2))
    >>> [each.name for each in default_candidates(8) if "k_sync" in each.name]
    ['k_sync(k=1)', 'k_sync(k=2)', 'k_sync(k=4)', 'k_sync(k=6)', 'k_sync(k=7)']
    """
    powers = [2**i for i in range(n.bit_length()) if 2**i < n]
    quorums = sorted({*powers, *(3 * power // 2 for power in powers[-1:] if power > 1 and 3 * power // 2 < n)})
    candidates = [
        Protocol(quorum="all", max_staleness=0, refill="update", name="bsp"),
        Protocol(quorum=1, max_staleness=inf, refill="arrival", name="asp"),
    ]
    for family, knobs in _FAMILIES.items():
        # k_batch_sync(k=1) makes the same updates as k_sync(k=1), k_async(k=1) and k_batch_async(k=1) as asp.
        least = 1 if family in ("k_sync", "pull") else 2
        ks = {*quorums, *([n] if knobs["refill"] == "arrival" else []), *([n - 1] if family == "k_sync" else [])}
        candidates += [named(family, k) for k in sorted(ks) if k >= least]
    return tuple(candidates)


def balanced(m: int) -> Protocol:
    """Return the protocol of updates whose samples are a queue of leases, of m pieces of a minibatch."""
    return Protocol(quorum="all", max_staleness=0, refill="share", name=f"balanced(m={m})")


def named(family: str, k: int) -> Protocol:
    """Return the protocol of a family with a quorum, for example "pull" and 4."""
    return Protocol(quorum=k, name=f"{family}(k={k})", **_FAMILIES[family])
