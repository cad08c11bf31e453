"""Sentences on stragglers: workers that were much slower than the others, or contributed nothing."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median

import numpy as np

from paceline.ddp_recording.recording import DDPRecording
from paceline.ddp_recording.waiting import find_stragglers, time_shares
from paceline.experiments.advise.recording_advice import straggler_sentence
from paceline.recording.recorded_ddp_run import RecordedDDPRun
from paceline.report.run_data import FATES, Column, RunData
from paceline.report.summary_table import number
from paceline.report.worker_stats import QUANTILES, RoundTripStats, round_trips

LEAST_SLOWER = 1.05  # smallest ratio to the median round trip that counts as slower
SLOW = 2.0  # smallest ratio to the median round trip of a straggler
SURELY_SLOW = 1.3  # the same for a worker whose median is certain
DEVIATIONS = 4.0  # standard errors of its median by which such a worker is slower
ERROR_OF_MEDIAN = 0.93  # standard error of the median of normal samples: times the interquartile range, by sqrt(number)
LEAST_FINISHED = 3  # mean gradients of the other workers before one without any counts as a straggler
LEAST_WAIT = 0.01  # smallest share of the time of a run for which updates waited that is named
LEAST_SEEN = 3  # smallest number of tasks of a slow worker
MOST_NAMED = 4
MEDIAN = QUANTILES.index(50)


def stragglers(run: RunData) -> list[str]:
    """Return a sentence for each straggler of a run, the slowest first.

    A straggler has a median round trip of at least twice the median over the workers, or of 1.3 times where its times
    vary too little for chance, or contributed nothing while the others contributed. If most of its tasks were
    interrupted or unfinished, its median is a lower bound.
    """
    if isinstance(run.run, RecordedDDPRun):
        return _of_recording(run.run.recording)
    used = np.bincount(run.work["worker"][run.fates == FATES.index("used")], minlength=run.workers)
    tasks = np.bincount(run.work["worker"], minlength=run.workers)
    return slow_workers(round_trips(run), tasks, used, run.waits_s, run.end_s)


def slow_workers(
    rows: Sequence[RoundTripStats | None], tasks: Column, used: Column, waits_s: Sequence[float], end_s: float
) -> list[str]:
    """Return a sentence for each straggler, the slowest first.

    Args:
        rows: round-trip times of each worker.
        tasks: number of tasks of each worker.
        used: number of used gradients of each worker.
        waits_s: seconds for which updates waited for their last gradient alone, by its worker.
        end_s: time of the run in seconds.
    """
    workers = len(rows)
    if workers < 2 or not any(rows):
        return []
    typical_s = _typical_s(rows)
    found = []
    for worker, row in enumerate(rows):
        if row is None or typical_s <= 0:
            continue
        ratio = row.quantiles_s[MEDIAN] / typical_s
        seen = int(tasks[worker])
        is_slow = seen >= LEAST_SEEN and (ratio >= SLOW or _is_surely_slow(row, typical_s, seen))
        is_useless = not used[worker] and (used.sum() / (workers - 1)) >= LEAST_FINISHED
        if is_slow or is_useless:
            slower = f"worker {worker} {_slower(row, typical_s)}"
            share = _sentence(slower, int(used[worker]), int(used.sum()), workers)
            found.append((ratio, share + _cost(waits_s[worker], end_s)))
    sentences = [sentence for _, sentence in sorted(found, key=lambda each: -each[0])]
    left_out = len(sentences) - MOST_NAMED
    more = f"{left_out} more worker{'s were stragglers' if left_out > 1 else ' was a straggler'}"
    return sentences[:MOST_NAMED] + ([more] if left_out > 0 else [])


def _of_recording(recording: DDPRecording) -> list[str]:
    """Return the waiting share of a DDP recording, and a sentence for each slow rank."""
    found = [straggler_sentence(each).rstrip(".") for each in find_stragglers(recording)[:MOST_NAMED]]
    return [f"{time_shares(recording).waiting_share:.1%} of the rank-time was waiting for slower ranks", *found]


def _typical_s(rows: Sequence[RoundTripStats | None]) -> float:
    """Return the median over the workers of the median round trip."""
    return median(row.quantiles_s[MEDIAN] for row in rows if row is not None)


def _is_surely_slow(row: RoundTripStats, typical_s: float, tasks: int) -> bool:
    """Return whether the median of a worker is above that of the others by more than its times can vary."""
    low_s, median_s, high_s = (row.quantiles_s[QUANTILES.index(percent)] for percent in (25, 50, 75))
    error_s = ERROR_OF_MEDIAN * (high_s - low_s) / sqrt(tasks)
    return median_s >= SURELY_SLOW * typical_s and median_s - typical_s >= DEVIATIONS * error_s


def _slower(row: RoundTripStats, typical_s: float) -> str:
    """Return how much slower a worker was than the median over the workers, or a lower bound."""
    seen_s = row.quantiles_s[MEDIAN]
    ratio, is_known = seen_s / typical_s, row.known > MEDIAN
    if ratio >= LEAST_SLOWER:
        return f"was {'' if is_known else 'at least '}{ratio:.1f} x slower than the median"
    if is_known:
        return "was not slower than the median"
    return (
        f"was interrupted before it finished (after {seen_s:.3g} s, where the median round trip is {typical_s:.3g} s)"
    )


def _sentence(slower: str, used: int, of_all: int, workers: int) -> str:
    if not used:
        return f"{slower} and contributed nothing"
    return f"{slower} and contributed {used / of_all:.1%} of the gradients ({1 / workers:.1%} is an equal share)"


def _cost(wait_s: float, end_s: float) -> str:
    """Return for how long updates waited for a worker, if this was long enough."""
    if wait_s < LEAST_WAIT * end_s or not wait_s:
        return ""
    return f"; updates waited {number(wait_s)} s for it alone, {wait_s / end_s:.0%} of the time"
