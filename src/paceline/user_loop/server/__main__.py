"""Program of the process beside rank 0, or of its standby, which reads its run from standard input."""

from __future__ import annotations

import gc

gc.disable()  # a collection visits all that torch has made so far: a fifth of the time of the imports

import os  # noqa: E402
import sys  # noqa: E402
from typing import IO  # noqa: E402

from paceline.user_loop.server.server_process import main  # noqa: E402


def pipe_to_rank_0() -> IO[bytes]:
    """Return the standard output, to which nothing else is written from now on."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


gc.freeze()
gc.enable()
status = main(sys.stdin.buffer, pipe_to_rank_0())
sys.stderr.flush()
os._exit(status)  # the thread that waits for rank 0 holds the lock of standard input
