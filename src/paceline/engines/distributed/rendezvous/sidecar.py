"""Sidecar processes that a rank starts with its own command: a worker, an evaluator or a shard server."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from paceline.clusters.launch_env import SIDECAR
from paceline.errors import RunError

STOP_TIMEOUT_S = 5.0


class SidecarProcess:
    """Second process of a rank's script, in which `pl.train` serves as a worker and returns with the run.

    Its standard output is dropped, because the rank prints the same.

    Args:
        worker: number of the worker that the process is.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        command = [sys.executable, *sys.orig_argv[1:]]
        environment = {**os.environ, SIDECAR: str(worker)}
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def check(self) -> None:
        """Raise a RunError if the process has ended before it took part."""
        status = self._process.poll()
        if status is not None:
            raise RunError(f"worker {self._worker}, beside rank 0, exited with status {status} before it took part")

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def stop(self) -> None:
        """Wait for the process to exit; kill it after a timeout."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self._process.kill()
        self._process.wait()
