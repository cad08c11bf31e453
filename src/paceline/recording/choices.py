"""Last choices of a run: protocol and learning rate, in one line."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.records import DecisionMade, Record


def last_choices(records: Iterable[Record]) -> str:
    """Return the protocol and the learning rate with which a run has ended, and why; empty if nothing chose them.

    >>> reason = "asp: 1.5 x the progress of bsp; phi 40; ..."
    >>> switch = DecisionMade(now_s=12.0, kind="protocol", reason=reason, numbers={"asp": 2.0})
    >>> reason = "0.2 of the given rate for k=1: phi 40"
    >>> rate = DecisionMade(now_s=15.0, kind="learning_rate", reason=reason, numbers={"phi": 40.0})
    >>> last_choices([switch, rate])
    'asp since 12 s (1 change): 1.5 x the progress of bsp; 0.2 of the given rate for k=1: phi 40'
    """
    changes, rate, protocol, since_s = 0, "", "", 0.0
    for record in records:
        if not isinstance(record, DecisionMade) or record.numbers is None:
            continue
        if record.kind == "protocol":
            changes, protocol, since_s = changes + 1, record.reason, record.now_s
        elif record.kind == "learning_rate":
            rate = record.reason
    name, _, why = protocol.partition(": ")
    times = f"{changes} change{'' if changes == 1 else 's'}"
    chosen = f"{name} since {since_s:.3g} s ({times}): {why.partition('; ')[0]}" if protocol else ""
    return "; ".join(filter(None, (chosen, rate)))
