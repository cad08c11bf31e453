"""Process of the standby beside the last rank, which goes on with the run if rank 0 is lost."""

from __future__ import annotations

import subprocess
from contextlib import suppress

from paceline.engines.distributed import Sidecar
from paceline.user_loop.server.description import SentRun, send_run
from paceline.user_loop.server.server_process import COMMAND


class StandbyProcess(Sidecar):
    """Standby of the coordinator of an attached run. It ends with its rank.

    Args:
        worker: number of the standby.
        sent: run of the coordinator, with the launch settings of the standby.
    """

    def __init__(self, worker: int, sent: SentRun) -> None:
        super().__init__(worker)
        self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        send_run(self._process.stdin, sent)

    @property
    def status(self) -> int | None:
        """Exit status, None while the process runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def wait(self, timeout_s: float | None) -> None:
        """Wait for the process to exit, at most for a number of seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
