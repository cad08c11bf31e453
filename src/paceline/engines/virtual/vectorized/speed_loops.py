"""Loops over the known times of all workers, which numba compiles."""

from __future__ import annotations

from math import log

import numpy as np

from paceline.engines.virtual.vectorized.lease_arrays import CANCELLED
from paceline.policies.estimators.speeds.restarting_median import JUMP
from paceline.tensors.compiled import compiled


@compiled
def _median(values):  # type: ignore[no-untyped-def]
    ordered = np.sort(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@compiled
def add_cancelled_leases(rows, known, record):  # type: ignore[no-untyped-def]
    """Add the cancelled leases of an update, as `ShareState.add_cancelled`."""
    for number in range(record.counts[CANCELLED]):
        worker, samples, elapsed_s = record.workers[number], record.samples[number], record.elapsed_s[number]
        row = rows[worker]
        ended = row.ended_samples
        if not ended:
            length = known.lengths[worker]
            expected_s = _median(known.values[worker, :length]) * samples if length else 0.0
            row.ended_samples += samples
            row.ended_s += max(elapsed_s, expected_s)
        elif elapsed_s * ended > row.ended_s * samples:
            row.ended_samples += samples
            row.ended_s += elapsed_s


@compiled
def _side(value, middle):  # type: ignore[no-untyped-def]
    if value > JUMP * middle:
        return 1
    return -1 if value < middle / JUMP else 0


@compiled
def _append(known, worker, value):  # type: ignore[no-untyped-def]
    length, window = known.lengths[worker], known.values.shape[1]
    if length == window:
        known.values[worker, :-1] = known.values[worker, 1:].copy()
        length -= 1
    known.values[worker, length] = value
    known.lengths[worker] = length + 1


@compiled
def _add_value(known, worker, value):  # type: ignore[no-untyped-def]
    """Add a value, as `RestartingMedian.add`."""
    count = known.before_lengths[worker]
    if count:
        before, first = known.before[worker, :count].copy(), known.values[worker, known.lengths[worker] - 1]
        known.before_lengths[worker] = 0
        middle = _median(before)
        lasts = _side(first, middle) == _side(value, middle)
        known.jumps[0 if lasts else 1] += 1
        known.lengths[worker] = 0
        if not lasts:
            for each in before:
                _append(known, worker, each)
        _append(known, worker, first)
        if lasts:
            _append(known, worker, value)
            return
    length = known.lengths[worker]
    if length and _side(value, _median(known.values[worker, :length])):
        known.before[worker, :length] = known.values[worker, :length]
        known.before_lengths[worker] = length
        if known.jumps[0] > known.jumps[1]:
            known.lengths[worker] = 0
    _append(known, worker, value)


@compiled
def add_ended_leases(rows, known):  # type: ignore[no-untyped-def]
    """Add the seconds per sample of an update to the known ones, and begin the next update."""
    for worker in range(len(rows)):
        row = rows[worker]
        if row.ended_samples and row.ended_s > 0:
            _add_value(known, worker, row.ended_s / row.ended_samples)
        row.ended_samples = 0
        row.ended_s = 0.0
        row.first_samples = 0


@compiled
def spread(known, medians_s):  # type: ignore[no-untyped-def]
    """Return the medians of the known times in the given memory, and the variance of their logarithms around these."""
    squares, count = 0.0, 0
    for worker in range(len(known.lengths)):
        length = known.lengths[worker]
        medians_s[worker] = np.nan
        if length:
            middle = _median(known.values[worker, :length])
            medians_s[worker] = middle
            own = 0.0
            for value in known.values[worker, :length]:
                own += log(value / middle) ** 2
            squares += own
            count += length - 1
    return squares / count if count else np.inf


@compiled
def pieces_until(seconds, time_s, pieces):  # type: ignore[no-untyped-def]
    """Return how many pieces end by a time beside the first one of each worker; write them for each worker.

    Args:
        seconds: seconds of a piece, by worker, > 0.
        time_s: the time, > 0.
        pieces: number of pieces of each worker, written.
    """
    total = 0
    for worker in range(len(seconds)):
        each = seconds[worker]
        count = max(0, int(time_s / each) - 1)
        while each * (count + 2) <= time_s:
            count += 1
        while count and each * (count + 1) > time_s:
            count -= 1
        pieces[worker] = count
        total += count
    return total
