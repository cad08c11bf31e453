"""Millions of numbers in a page: small steps as bytes of one significance after the other, deflated."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.report.run_data import Column, RunData

RESOLUTION = 2**28  # quanta in the time of a run


def packed(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return whole numbers below 2**31 as text that the page unpacks.

    A column lies in four planes: the lowest bytes of all its numbers, then the second ones, and so on. Where
    numbers are small or alike the higher planes compress to nothing.
    """
    planes = [_planes(column) for column in columns.values()]
    return {
        "columns": [[name, len(column)] for name, column in columns.items()],
        "deflated": b64encode(zlib.compress(b"".join(planes), 6)).decode(),
    }


def packed_work(run: RunData) -> dict[str, Any]:
    """Return every piece of work: for each worker in turn, its idle and busy quanta and what became of it."""
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
    """Return every update: when, of how many gradients, and why."""
    columns = {
        "time": steps(quanta(run, run.updates["time_s"])),
        "k": run.updates["k"],
        "workload": steps(run.updates["workload"]),
        "reason": steps(run.updates["reason"]),
        "quorum_reason": steps(run.updates["quorum_reason"]),
    }
    return packed(columns)


def quantum_s(run: RunData) -> float:
    """Return the smallest difference in time that the page knows."""
    return run.end_s / RESOLUTION or 1.0


def quanta(run: RunData, times_s: Column) -> Column:
    """Return times in quanta."""
    whole: Column = np.rint(times_s / quantum_s(run)).astype(np.int64)
    return whole


def steps(column: Column) -> Column:
    """Return the differences between neighbours, the first from zero."""
    return np.diff(column, prepend=0)


def _planes(column: Column) -> bytes:
    return column.astype("<i4").view(np.uint8).reshape(-1, 4).T.tobytes()
