"""Processes that rank 0 starts beside itself, by its own command: a worker, and one that evaluates."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from paceline.clusters.launch_env import ASSISTANT
from paceline.errors import RunError

GRACE_S = 5.0


class SidecarProcess:
    """The script of rank 0 once more, where `pl.train` serves as a worker and ends with the run.

    What it prints to its standard output is dropped: rank 0 says the same.

    Args:
        worker: its number.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        command = [sys.executable, *sys.orig_argv[1:]]
        environment = {**os.environ, ASSISTANT: str(worker)}
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def check(self) -> None:
        """Raise a RunError if it has ended before it took part."""
        status = self._process.poll()
        if status is not None:
            raise RunError(f"worker {self._worker}, beside rank 0, ended with status {status} before it took part")

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()

    def end(self) -> None:
        """Wait for its end, and make one if need be."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        self._process.kill()
        self._process.wait()
