"""Return of a rank to a run that goes on: whether it was lost, and whose turn it is, by the launcher's store."""

from __future__ import annotations

from typing import Any

from paceline.clusters.launch_env import SURVIVES, UNFIT
from paceline.shares.survival.replicas import told_replicas
from paceline.shares.survival.roll import Roll, tell_loss, told

LAUNCH = "paceline/launch"  # in the launcher's store, for each rank: name of the launcher that has started it
RETURNING = "paceline/returning"  # in that store: number of the rank that comes back


def goes_on_without(store: Any, rank: int, ranks: int, launch: str) -> bool:
    """Return whether the other ranks go on without this one, which has just begun.

    A launcher that was lost itself has not told the loss of its ranks: one that another launcher starts tells its own.

    Args:
        store: launcher's store.
        rank: number of this rank.
        ranks: number of ranks.
        launch: name that all starts of this rank by one launcher share.
    """
    key = f"{LAUNCH}/{rank}"
    before = store.get(key).decode() if store.check([key]) else launch
    store.set(key, launch)
    if not store.check([SURVIVES]):
        return False
    if rank in Roll.called(told_replicas(store, ranks), told(store, ranks)).living:
        if before == launch or store.check([UNFIT]):
            return False
        tell_loss(store, rank, ranks)
    return True


def takes_turn(store: Any, rank: int) -> bool:
    """Return whether it is this rank's turn to come back.

    The others stop where one rank waits for them, and another one does not wait there. So one comes back at a time.
    """
    turn: bytes = store.compare_set(RETURNING, "", str(rank))
    return turn.decode() == str(rank)
