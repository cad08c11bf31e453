"""Wait for the processes with which a run begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import NOT_JOINED, Lost
from paceline.errors import RunError
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
NOTICE_S = 5.0  # of waiting, after which a line says for what


def await_peers(
    missing: Callable[[], str],
    wait: Callable[[], None],
    timeout_s: float,
    suffices: Callable[[], bool] = lambda: False,
    in_notice: Callable[[], str] = lambda: "",
) -> None:
    """Wait until all peers have joined, or until enough of them have after a timeout.

    Args:
        missing: names of the peers that have not joined, empty if all have.
        wait: waits for a moment and handles what happens meanwhile.
        timeout_s: seconds until the wait ends.
        suffices: whether the run may begin without those that are missing.
        in_notice: names of the missing peers in the line that is logged after some seconds, empty for the same.

    Raises:
        RunError: a peer that the run needs did not join in time.
    """
    begun_s = time.monotonic()
    is_named = False
    while named := missing():
        waited_s = time.monotonic() - begun_s
        if waited_s > NOTICE_S and not is_named:
            LOG.warning("waiting for %s, for up to start_timeout_s=%g", in_notice() or named, timeout_s)
            is_named = True
        if waited_s > timeout_s:
            if suffices():
                LOG.warning("%s did not join within start_timeout_s=%g: the run begins without", named, timeout_s)
                return
            raise RunError(f"{named} did not join within start_timeout_s={timeout_s:g}: check its log")
        wait()


def await_workers(
    cluster: Torchrun,
    joined: Callable[[], Collection[int]],
    wait: Callable[[], None],
    others: Callable[[], str] = lambda: "",
) -> None:
    """Wait until all workers that were started have joined, or `min_workers` of them after the start timeout.

    Args:
        cluster: launch settings of this process.
        joined: numbers of the workers that have joined.
        wait: waits for a moment and handles what happens meanwhile.
        others: names of the other processes that are missing, empty if there are none.

    Raises:
        RunError: a process that the run needs did not join in time.
    """

    def late() -> list[int]:
        return [worker for worker in range(cluster.started) if worker not in joined()]

    def missing() -> str:
        return others() or (f"worker {', '.join(map(str, late()))}" if late() else "")

    def suffices() -> bool:
        return not others() and cluster.min_workers is not None and len(joined()) >= cluster.min_workers

    def in_notice() -> str:
        return others() or (ranks_of(workers, cluster) if (workers := late()) else "")

    await_peers(missing, wait, cluster.start_timeout_s, suffices, in_notice)


def ranks_of(workers: Sequence[int], cluster: Torchrun) -> str:
    """Return the names of workers for messages: the rank that the launcher has given to each.

    Args:
        workers: numbers of the workers.
        cluster: launch settings of rank 0.
    """
    if cluster.workers == "node":
        return f"worker {', '.join(map(str, workers))}"
    before = cluster.has_worker_at_server + cluster.ranks.ranks_before - 1
    ranks = ", ".join(str(worker - before) for worker in workers)
    return f"rank {ranks} of {cluster.ranks.world_size - cluster.ranks.ranks_before}"


def not_joined(cluster: Torchrun, joined: Collection[int], now: float) -> list[Lost]:
    """Return the events of the workers that take no part at the beginning of a run, at this time."""
    return [Lost(now, worker, NOT_JOINED) for worker in range(cluster.n) if worker not in joined]
