"""Display that records its calls, and state of event logs, for tests of comparisons and searches."""

import os
import signal
from math import inf

from paceline.recording.run_folder import EVENTS


class RecordingDisplay:
    """Display that records its calls, and sends Ctrl-C after a number of runs."""

    def __init__(self, interrupts_at=inf):
        self.interrupts_at = interrupts_at
        self.planned = None
        self.ended = []

    def plan(self, cells, finished):
        self.planned = cells, finished

    def begin(self, cell):
        pass

    def show(self, cell, news):
        pass

    def end(self, cell, time_s, reason):
        self.ended.append((str(cell), reason))
        if len(self.ended) == self.interrupts_at:
            os.kill(os.getpid(), signal.SIGINT)


def log_states(folder):
    """Return inode, time and content of each run's event log; they are equal if the run was not repeated."""
    return {
        str(path.parent.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob(EVENTS)
    }
