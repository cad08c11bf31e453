"""Succession: how a standby takes the place of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Collection

from paceline.engines.distributed.coordinator_tensors import Taken
from paceline.engines.distributed.rendezvous.first_workers import await_peers
from paceline.errors import RunError


class Succession:
    """Condition on which a standby becomes the server.

    It begins with more than half of the processes that rank 0 had, so that no two servers train with them at the same
    time. Another process with the number of one of them does not count. The others join later.

    Attributes:
        known_processes: processes of the workers that took part at the last update that both have, as in `Hello`.
        newest_version: newest version that a worker may have.
        taken: version with which the standby begins.
    """

    known_processes: Collection[str] = ()
    newest_version = 0
    taken = Taken(0)

    def lacks(self, processes: Collection[str]) -> str:
        """Return what is missing while these processes are there; empty for nothing."""
        needed = len(self.known_processes) // 2 + 1 - len({*processes}.intersection(self.known_processes))
        return f"{needed} more workers of rank 0" if needed > 0 else ""

    def await_workers(self, lacks: Callable[[], str], read: Callable[[], None], timeout_s: float) -> None:
        """Wait for what is missing.

        Raises:
            RunError: it did not come in time.
        """
        try:
            await_peers(lacks, read, timeout_s)
        except RunError as error:
            advice = "rank 0 may go on without this process, so it ends; its state is in the folder of rank 0"
            raise RunError(f"{error}; {advice}") from error
