"""Process of the server beside rank 0: `python -m paceline.user_loop.server_process` reads its run from standard input.

It runs no code of the user and holds none of the data. It ends with rank 0, which keeps its standard input open.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import IO

from torch import Tensor

from paceline.clusters.launch_env import LaunchEnv
from paceline.clusters.torchrun import Torchrun
from paceline.errors import PacelineError, RunError
from paceline.run.train import train
from paceline.user_loop.description import ServerRun, make_job, recv_run, send_run
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
STOP_TIMEOUT_S = 20.0


class ServerProcess:
    """Server that rank 0 has started.

    Args:
        run: run of the server.
        tensors: first parameters and buffers.
    """

    def __init__(self, run: ServerRun, tensors: dict[str, Tensor]) -> None:
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        send_run(self._process.stdin, run, tensors)

    def check(self) -> None:
        """Raise a RunError if the process has failed."""
        if self._process.poll():
            raise RunError(
                f"the server of the run ended with status {self._process.returncode}: see what it has written above"
            )

    def wait(self) -> None:
        """Wait until the run has ended.

        Raises:
            RunError: the process has failed.
        """
        self._process.wait()
        self._close()
        self.check()

    def interrupt(self) -> None:
        """Ask the server to end the run."""
        self._close()

    def stop(self) -> None:
        """Interrupt the run, and kill the process after a timeout."""
        self.interrupt()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


def main(stream: IO[bytes]) -> int:
    """Serve the run that is described in a stream; return the exit status."""
    run, tensors = recv_run(stream)
    threading.Thread(target=_end_with, args=[stream], daemon=True).start()
    ranks = LaunchEnv(**{**run.ranks, "master": tuple(run.ranks["master"])})
    try:
        train(
            make_job(run.training, tensors),
            protocol=run.protocol,
            cluster=Torchrun(**run.cluster, ranks=ranks),
            stop=run.stop,
            seed=run.seed,
            progress=False,
            **run.options,
        )
    except PacelineError as error:
        LOG.error("the server: %s", error)
        return 1
    return 0


def _end_with(stream: IO[bytes]) -> None:
    """Ask this process to end when rank 0 has ended."""
    stream.read(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    status = main(sys.stdin.buffer)
    sys.stderr.flush()
    os._exit(status)  # the thread that waits for rank 0 holds the lock of standard input
