"""Sidecar processes that a rank starts: a worker, an evaluator or a shard server."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from math import inf

from paceline.clusters.launch_env import SERVER, SIDECAR, SPAWN_SIDECARS
from paceline.errors import RunError

STOP_TIMEOUT_S = 5.0


class Sidecar(ABC):
    """Process beside a rank, which serves as a worker in the run of the rank.

    Args:
        worker: number of the worker that the process is.

    Attributes:
        advice: what to do if the process ends before it takes part.
    """

    advice = ""

    def __init__(self, worker: int) -> None:
        self._worker = worker

    def check(self) -> None:
        """Raise a RunError if the process has ended before it took part."""
        if self.status is not None:
            raise RunError(
                f"worker {self._worker}, beside rank 0, exited with status {self.status} before it took part"
                f"{self.advice}"
            )

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Wait for the process to exit; kill it after a timeout."""
        self.wait(timeout_s if timeout_s < inf else None)
        self.kill()
        self.wait(None)

    @property
    @abstractmethod
    def status(self) -> int | None:
        """Exit status, None while the process runs."""

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL."""

    @abstractmethod
    def wait(self, timeout_s: float | None) -> None:
        """Wait for the process to exit, at most for a number of seconds."""


class SubprocessSidecar(Sidecar):
    """Process beside a rank that a command has started.

    Args:
        worker: number of the worker that the process is.
        process: the process.
    """

    def __init__(self, worker: int, process: subprocess.Popen[bytes]) -> None:
        super().__init__(worker)
        self._process = process

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


class CommandSidecar(SubprocessSidecar):
    """Second process of a rank's command, in which `pl.train` serves as a worker and returns with the run.

    Its standard output is dropped, because the rank prints the same.

    Args:
        worker: number of the worker that the process is.
        server: host and port of the server that the process joins; None for that at rank 0.
    """

    advice = f"; if the command of rank 0 cannot be run again, set {SPAWN_SIDECARS}=1"

    def __init__(self, worker: int, server: tuple[str, int] | None = None) -> None:
        command = [sys.executable, *sys.orig_argv[1:]]  # `sys.argv` lacks the options of Python, as -m
        environment = {**os.environ, SIDECAR: str(worker), **({SERVER: "{}:{}".format(*server)} if server else {})}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        super().__init__(worker, process)
