"""Compression of long columns for the page: differences, split into byte planes, deflated."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.report.run_data import Column, RunData

RESOLUTION = 2**28  # time steps in a run


def packed(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return columns of whole numbers below 2**31 as text that the page unpacks.

    A column has four planes: the lowest bytes of all its numbers, then the second ones, and so on. The higher planes
    of small or equal numbers compress to almost nothing.
    """
    planes = [_planes(column) for column in columns.values()]
    return {
        "columns": [[name, len(column)] for name, column in columns.items()],
        "deflated": b64encode(zlib.compress(b"".join(planes), 6)).decode(),
    }


def packed_work(run: RunData) -> dict[str, Any]:
    """Return all tasks by worker, with the idle time before each one and its duration in time steps."""
    worker, first = run.work["worker"], np.searchsorted(run.work["worker"], np.arange(run.workers + 1))
    start, end = quanta(run, run.work["start_s"]), quanta(run, run.work["end_s"])
    previous_end = np.append(0, end)[: len(end)]
    previous_end[first[:-1][np.diff(first) > 0]] = 0
    columns = {
        "idle": start - previous_end,
        "busy": end - start,
        "draw": steps(run.work["draw"]),
        "version": steps(run.work["version"]),
        "staleness": run.work["staleness"],
        "ending": run.work["ending"],
    }
    assert len(worker) == first[-1]
    return {"per_worker": np.diff(first).tolist(), **packed(columns)}


def packed_updates(run: RunData) -> dict[str, Any]:
    """Return all updates with time, quorum, workload and reasons."""
    columns = {
        "time": steps(quanta(run, run.updates["time_s"])),
        "k": run.updates["k"],
        "workload": steps(run.updates["workload"]),
        "reason": steps(run.updates["reason"]),
        "quorum_reason": steps(run.updates["quorum_reason"]),
    }
    return packed(columns)


def quantum_s(run: RunData) -> float:
    """Return the time step of the page, in seconds."""
    return run.end_s / RESOLUTION or 1.0


def quanta(run: RunData, times_s: Column) -> Column:
    """Return times in time steps."""
    whole: Column = np.rint(times_s / quantum_s(run)).astype(np.int64)
    return whole


def steps(column: Column) -> Column:
    """Return the differences between neighbours, the first one to zero."""
    return np.diff(column, prepend=0)


def _planes(column: Column) -> bytes:
    return column.astype("<i4").view(np.uint8).reshape(-1, 4).T.tobytes()
