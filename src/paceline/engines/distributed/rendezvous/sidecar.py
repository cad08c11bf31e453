"""Sidecar processes that a rank starts with its own command: a worker, an evaluator or a shard server."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from math import inf

from paceline.clusters.launch_env import SERVER, SIDECAR
from paceline.errors import RunError

STOP_TIMEOUT_S = 5.0


class SidecarProcess:
    """Second process of a rank's script, in which `pl.train` serves as a worker and returns with the run.

    Its standard output is dropped, because the rank prints the same.

    Args:
        worker: number of the worker that the process is.
        server: host and port of the server that the process joins; None for that at rank 0.
    """

    def __init__(self, worker: int, server: tuple[str, int] | None = None) -> None:
        self._worker = worker
        command = [sys.executable, *sys.orig_argv[1:]]
        environment = {**os.environ, SIDECAR: str(worker), **({SERVER: "{}:{}".format(*server)} if server else {})}
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def check(self) -> None:
        """Raise a RunError if the process has ended before it took part."""
        status = self._process.poll()
        if status is not None:
            raise RunError(f"worker {self._worker}, beside rank 0, exited with status {status} before it took part")

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Wait for the process to exit; kill it after a timeout."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s if timeout_s < inf else None)
        self._process.kill()
        self._process.wait()
