"""Replay of the decisions of a script whose ranks share the samples: the logged times through the policy."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from paceline.core.records import DecisionMade, RunResumed
from paceline.policies.share_exchanges import updates_at_once
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
    policy, reader = ShareBalancer(configuration["workers"], sizes), TimedUpdates()
    limits = _limits(saved)
    due: deque[tuple[int, list[float]]] = deque()  # shares, and the update at whose end they are decided
    at_once = 1
    exchanged: list[TimedUpdate] = []  # of such an exchange
    updates = decisions = 0
    for record in saved.history:
        if isinstance(record, RunResumed) or (isinstance(record, DecisionMade) and record.kind == REGROUPED):
            policy = ShareBalancer(configuration["workers"], sizes)
            due.clear()
            at_once, exchanged = 1, []
        elif isinstance(record, DecisionMade) and record.kind == SHARES:
            decisions += 1
            logged = [*(record.numbers or {}).values()]
            ours = due.popleft() if due and due[0][0] == updates else None
            if ours is None or ours[1] != logged:
                return ReplayedShares(updates, decisions, _difference(updates, logged, ours and ours[1]))
        elif (update := reader.add(record)) is not None:
            if due and due[0][0] <= updates:
                return ReplayedShares(updates, decisions, _difference(updates, None, due[0][1]))
            updates += 1
            decisions += 1
            exchanged.append(update)
            work, seconds = _of_all(update, configuration["workers"])
            if len(exchanged) < at_once:
                policy.add(work, seconds)
                continue
            policy.limits = limits.get(updates + about["lag"], policy.limits)
            decision = policy.decide(work, seconds)
            if decision is not None:
                due.append((updates + about["lag"], [float(share) for share in decision.shares]))
            at_once, exchanged = updates_at_once([each.seconds for each in exchanged]), []
    return ReplayedShares(updates, decisions, "")


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
