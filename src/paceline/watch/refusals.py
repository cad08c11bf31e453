"""Count and log of the refused requests to the page, of bounded size."""

from __future__ import annotations

import logging
import threading
import time

LOG_INTERVAL_S = 60.0
MAX_LOGGED_HOSTS = 1000
LOG = logging.getLogger("paceline")


class Refusals:
    """Counter of refused requests. The log has the first one of each host, and then the count once a minute at most.

    Attributes:
        count: number of refused requests.
    """

    def __init__(self) -> None:
        self.count = 0
        self._logged = 0  # number of requests at the last line of the log
        self._hosts: set[str] = set()
        self._next_log_s = 0.0
        self._lock = threading.Lock()

    def add(self, host: str, reason: str) -> None:
        """Count a request, and log it or the count if it is time."""
        with self._lock:
            self.count += 1
            if host not in self._hosts and len(self._hosts) < MAX_LOGGED_HOSTS:
                self._hosts.add(host)
                self._log(f"refused a request from {host}: {reason}")
            elif time.monotonic() >= self._next_log_s:
                self._log(f"refused {self.count} requests so far, the last one from {host}: {reason}")

    def close(self) -> None:
        """Log the count if requests were refused after the last line."""
        with self._lock:
            if self.count > self._logged:
                self._log(f"refused {self.count} requests in all")

    def _log(self, line: str) -> None:
        LOG.warning(line)
        self._logged = self.count
        self._next_log_s = time.monotonic() + LOG_INTERVAL_S
