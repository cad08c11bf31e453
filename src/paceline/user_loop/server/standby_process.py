"""Process of the standby beside the last rank, which goes on with the run if rank 0 is lost."""

from __future__ import annotations

import subprocess

from paceline.engines.distributed import SubprocessSidecar
from paceline.user_loop.server.description import SentRun, send_run
from paceline.user_loop.server.server_process import COMMAND


class StandbyProcess(SubprocessSidecar):
    """Standby of the coordinator of an attached run. It ends with its rank.

    Args:
        worker: number of the standby.
        sent: run of the coordinator, with the launch settings of the standby.
    """

    def __init__(self, worker: int, sent: SentRun) -> None:
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        super().__init__(worker, process)
        assert process.stdin is not None
        send_run(process.stdin, sent)
