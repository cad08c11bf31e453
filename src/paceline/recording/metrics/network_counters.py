"""Counts of the connections of one process: bytes, and rejected connections by their cause."""

from __future__ import annotations

import threading
from enum import StrEnum


class RejectionCause(StrEnum):
    """Cause of a rejected connection, as label of its metric."""

    AUTHENTICATION = "authentication"
    OTHER_RUN = "other_run"
    OTHER_VERSION = "other_version"
    OTHER_JOB = "other_job"
    TIMEOUT = "timeout"
    OVERLOAD = "overload"
    DISCONNECTED = "disconnected"


class NetworkCounters:
    """Counts of the connections of one process, since it made its transport; any thread may add to them.

    They are not records of the run: a stranger who connects again and again must not fill the event log.

    Attributes:
        sent_bytes: bytes of messages and tensors that were sent, before encryption.
        received_bytes: bytes of messages and tensors that were received, after decryption.
        rejected: number of rejected connections by cause.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.rejected = dict.fromkeys(RejectionCause, 0)
        self._lock = threading.Lock()

    def on_sent(self, nbytes: int) -> None:
        """Count bytes that the operating system has taken."""
        with self._lock:
            self.sent_bytes += nbytes

    def on_received(self, nbytes: int) -> None:
        """Count bytes that have arrived."""
        with self._lock:
            self.received_bytes += nbytes

    def on_rejected(self, cause: RejectionCause) -> None:
        """Count a rejected connection."""
        with self._lock:
            self.rejected[cause] += 1
