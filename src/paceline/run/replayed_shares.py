"""Replay of the decisions of a script whose ranks share the samples: the logged times through the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.core.records import DecisionMade, RunResumed
from paceline.policies.share_exchanges import ShareExchanges
from paceline.policies.share_limits import ShareLimits
from paceline.policies.shares import Pieces, ShareBalancer
from paceline.recording.run_folder import SavedRun
from paceline.recording.script_runs import COMPILED, LIMITS, REGROUPED, SCRIPT, SHARES
from paceline.recording.timed_updates import TimedUpdate, TimedUpdates


class ReplayedShares(NamedTuple):
    """Counts of a log, and its first difference from the replay as text; empty without any."""

    updates: int
    decisions: int
    difference: str


def replay_shares(saved: SavedRun) -> ReplayedShares:
    """Replay the decisions on shares in the log of a script."""
    configuration, about = saved.configuration, saved.configuration[SCRIPT]
    sizes = Pieces(configuration["batch_size"], about["pieces"], about["max_share"])
    reader, limits = TimedUpdates(), _limits(saved)
    policy, exchanges = _begun(configuration, sizes)
    ours: list[float] | None = None  # shares that are decided at the end of the latest update
    updates = decisions = 0
    for record in saved.history:
        if isinstance(record, RunResumed) or (isinstance(record, DecisionMade) and record.kind == REGROUPED):
            equal = record.numbers if isinstance(record, DecisionMade) else None
            policy, exchanges = _begun(configuration, sizes, equal)
            ours = None
        elif isinstance(record, DecisionMade) and record.kind == SHARES:
            decisions += 1
            logged = [*(record.numbers or {}).values()]
            if ours != logged:
                return ReplayedShares(updates, decisions, _difference(updates, logged, ours))
            ours = None
        elif (update := reader.add(record)) is not None:
            if ours is not None:
                return ReplayedShares(updates, decisions, _difference(updates, None, ours))
            updates += 1
            decisions += 1
            policy.limits = limits.get(updates, policy.limits)
            decision = exchanges.end_update(*_of_all(update, configuration["workers"]))
            ours = [float(share) for share in decision.shares] if decision is not None else None
    return ReplayedShares(updates, decisions, "")


def _begun(
    configuration: Mapping[str, Any], sizes: Pieces, equal: Mapping[str, float] | None = None
) -> tuple[ShareBalancer, ShareExchanges]:
    """Return a policy that knows no times, and the exchanges by which ranks follow it."""
    shares = tuple(int(share) for share in equal.values()) if equal else None
    policy = ShareBalancer(configuration["workers"], sizes, shares)
    return policy, ShareExchanges(policy, late=configuration[SCRIPT]["lag"] - 1)


def _of_all(update: TimedUpdate, ranks: int) -> tuple[list[float], list[float]]:
    """Return work and seconds of all ranks, 0 for one that is lost."""
    work, seconds = (
        dict(zip(update.ranks, update.work, strict=True)),
        dict(zip(update.ranks, update.seconds, strict=True)),
    )
    return [work.get(rank, 0.0) for rank in range(ranks)], [seconds.get(rank, 0.0) for rank in range(ranks)]


def _limits(saved: SavedRun) -> dict[int, ShareLimits]:
    """Return the logged limits by the number of the update at whose end they begin to hold."""
    reader, updates, found = TimedUpdates(), 0, {}
    for record in saved.history:
        if isinstance(record, DecisionMade) and record.kind == LIMITS:
            numbers = dict(record.numbers or {})
            is_compiled = bool(numbers.pop(COMPILED, 0))
            found[updates] = ShareLimits(tuple(map(int, numbers.values())), is_compiled)
        else:
            updates += reader.add(record) is not None
    return found


def _difference(updates: int, logged: list[float] | None, ours: list[float] | None) -> str:
    return f"after {updates} updates: the log has {_shown(logged)}, the replay has {_shown(ours)}"


def _shown(shares: list[float] | None) -> str:
    return "no new shares" if shares is None else f"the shares {', '.join(f'{each:g}' for each in shares)}"
