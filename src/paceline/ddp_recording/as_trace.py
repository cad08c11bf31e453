"""Conversion of a DDP recording to a trace, to simulate its times under other protocols."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from paceline.clusters.timing.trace import Trace, TraceRow
from paceline.ddp_recording.recording import DDPRecording


def trace_of(recording: DDPRecording, *, without: Collection[int] = ()) -> Trace:
    """Return the trace of a recording: a row per rank and step, with the own work and the sum.

    Protocols with a server use half of each sum as the pull and half as the push. DDP's sum does not take as long as
    the pulls and pushes of a server, so these times are an assumption.

    Args:
        recording: recording of two ranks or more.
        without: ranks to leave out; the others are numbered from 0.
    """
    starts_s = np.cumsum(recording.step_s, axis=1) - recording.step_s
    kept = [rank for rank in range(recording.ranks) if rank not in without]
    rows = []
    for worker, rank in enumerate(kept):
        columns = (starts_s[rank], recording.work_s[rank], recording.step_s[rank], recording.sum_s)
        for step, (start_s, work_s, step_s, sum_s) in enumerate(np.stack(columns, axis=1).tolist()):
            rows.append(
                TraceRow(
                    worker=worker,
                    draw=step + 1,
                    start_s=start_s,
                    pull_s=0.0,
                    compute_s=work_s,
                    push_s=0.0,
                    end_s=start_s + step_s,
                    censored=0,
                    sum_s=sum_s,
                )
            )
    return Trace(rows, has_server=False, sums_as_transfers=True, source=str(recording.path))


def read_trace_of(path: str | Path) -> Trace:
    """Read a recording and return its trace.

    Raises:
        UsageError: the folder has no complete recording.
    """
    return trace_of(DDPRecording(path))
