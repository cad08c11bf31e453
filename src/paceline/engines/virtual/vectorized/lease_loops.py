"""Loop over the leases of an update, which numba compiles."""

from __future__ import annotations

import numpy as np

from paceline.engines.virtual.vectorized.lease_arrays import (
    ARRIVALS,
    BUSY,
    BUSY_S,
    CANCELLED,
    COSTS_KNOWN,
    HEAP,
    IDLE,
    LEASE_S,
    NONE,
    OLDEST_COST,
    ORDER,
    PULLS,
    USEFUL_S,
)
from paceline.policies.controllers.balance import COSTS
from paceline.tensors.compiled import compiled

# --- heap of tasks ----------------------------------------------------------------------------------------

# Inner loops call with arrays: a call with a tuple of arrays would count the references to each of them.


@compiled
def _is_earlier(ends_s, numbers, end_s, number, place):  # type: ignore[no-untyped-def]
    """Return whether a task ends before the one at a place of the heap."""
    return end_s < ends_s[place] or (end_s == ends_s[place] and number < numbers[place])


@compiled
def _push(tasks, record, end_s, number):  # type: ignore[no-untyped-def]
    """Add a task to the heap."""
    ends_s, numbers = tasks.heap_s, tasks.heap
    place = record.counts[HEAP]
    record.counts[HEAP] += 1
    while place and _is_earlier(ends_s, numbers, end_s, number, (place - 1) // 2):
        parent = (place - 1) // 2
        ends_s[place], numbers[place] = ends_s[parent], numbers[parent]
        place = parent
    ends_s[place], numbers[place] = end_s, number


@compiled
def _replace_first(tasks, record, end_s, number):  # type: ignore[no-untyped-def]
    """Replace the first task of the heap by another one."""
    ends_s, numbers = tasks.heap_s, tasks.heap
    size, place = record.counts[HEAP], 0
    ends_s[size] = np.inf  # then each place has two children or none
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if ends_s[child] == ends_s[child + 1]:
            child += numbers[child + 1] < numbers[child]
        else:
            child += ends_s[child + 1] < ends_s[child]  # a branch could not be predicted
        if _is_earlier(ends_s, numbers, end_s, number, child):
            break
        ends_s[place], numbers[place] = ends_s[child], numbers[child]
        place = child
    ends_s[place], numbers[place] = end_s, number


@compiled
def _remove_first(tasks, record):  # type: ignore[no-untyped-def]
    """Remove the first entry of the heap."""
    record.counts[HEAP] -= 1
    last = record.counts[HEAP]
    _replace_first(tasks, record, tasks.heap_s[last], tasks.heap[last])


# --- leases -----------------------------------------------------------------------------------------------


@compiled
def _begin(tasks, record, trips, worker, samples, assigned_s, begun_s):  # type: ignore[no-untyped-def]
    """Let a lease of a worker begin; return when it ends."""
    row = tasks.rows[worker]
    lease_s = row.work_s
    if samples != trips.size:
        fixed_s = min(trips.cost_s, lease_s)
        lease_s = fixed_s + (lease_s - fixed_s) * (samples / trips.size)
    row.number = record.counts[ORDER] * len(tasks.rows) + worker
    row.assigned_s = assigned_s
    row.begun_s = begun_s
    row.samples = samples
    record.counts[ORDER] += 1
    record.counts[PULLS] += 1
    return begun_s + (trips.network_s + lease_s)


@compiled
def _become_idle(tasks, record, worker):  # type: ignore[no-untyped-def]
    """Note that a worker has no task from now on."""
    tasks.rows[worker].number = NONE
    tasks.idle_since[worker] = record.counts[IDLE]
    record.counts[IDLE] += 1
    record.counts[BUSY] -= 1


@compiled
def _add_cost(costs, record, cost_s):  # type: ignore[no-untyped-def]
    """Add the cost of a lease to the latest ones, in whose order their median is found."""
    known, place, ordered_s = record.counts[COSTS_KNOWN], 0, costs.ordered_s
    if known == COSTS:
        known -= 1
        while ordered_s[place] != costs.latest_s[record.counts[OLDEST_COST]]:
            place += 1
        for later in range(place, known):
            ordered_s[later] = ordered_s[later + 1]
    place = known
    while place and ordered_s[place - 1] > cost_s:
        ordered_s[place] = ordered_s[place - 1]
        place -= 1
    ordered_s[place] = cost_s
    costs.latest_s[record.counts[OLDEST_COST]] = cost_s
    record.counts[OLDEST_COST] = (record.counts[OLDEST_COST] + 1) % COSTS
    record.counts[COSTS_KNOWN] = known + 1
    middle = (known + 1) // 2
    median_s = ordered_s[middle] if (known + 1) % 2 else (ordered_s[middle - 1] + ordered_s[middle]) / 2
    record.sums[LEASE_S] = max(0.0, median_s)


@compiled
def _add_time(row, costs, record, seconds):  # type: ignore[no-untyped-def]
    """Add the time of the lease of a worker, as `ShareState.add`."""
    if not row.first_samples:
        row.first_samples = row.samples
        row.first_s = seconds
    elif row.samples != row.first_samples:
        difference_s = seconds * row.first_samples - row.first_s * row.samples
        _add_cost(costs, record, difference_s / (row.first_samples - row.samples))
    row.ended_samples += row.samples
    row.ended_s += max(seconds - record.sums[LEASE_S], seconds / 2)


@compiled
def _note_once(tasks, record, number, worker):  # type: ignore[no-untyped-def]
    """Note that no other worker has the lease that a worker has just taken; return the next number."""
    record.once[number] = worker
    record.taken[number] = tasks.rows[worker].number
    tasks.rows[worker].copy = NONE
    return number + 1


@compiled
def _is_once(tasks, record, number):  # type: ignore[no-untyped-def]
    """Return whether a worker still has the lease that it took at this place, and no other worker has a copy."""
    row = tasks.rows[record.once[number]]
    return row.number == record.taken[number] and row.copy == NONE


@compiled
def _cancel(tasks, record, worker, now_s):  # type: ignore[no-untyped-def]
    """Cancel the lease of a worker, of which another one has ended the copy."""
    row = tasks.rows[worker]
    row.copy = NONE
    _become_idle(tasks, record, worker)
    record.sums[BUSY_S] += now_s - row.begun_s
    number = record.counts[CANCELLED]
    record.workers[number] = worker
    record.samples[number] = row.samples
    record.elapsed_s[number] = now_s - row.assigned_s
    record.counts[CANCELLED] += 1


@compiled
def run_update(tasks, costs, trips, opening, record):  # type: ignore[no-untyped-def]
    """Deal the leases of an update until each of its samples is used, as `LeaseQueue`; return when that is."""
    record.counts[CANCELLED] = record.counts[HEAP] = 0
    left, oldest, newest, now_s = opening.left, 0, 0, opening.begun_s
    for worker in opening.idle:
        tasks.rows[worker].work_s = opening.work_s[worker]
        assigned_s, begun_s = opening.assigned_s, opening.begun_s
        end_s = _begin(
            tasks, record, trips, worker, samples=opening.first[worker], assigned_s=assigned_s, begun_s=begun_s
        )
        _push(tasks, record, end_s, tasks.rows[worker].number)
        record.counts[BUSY] += 1
        newest = _note_once(tasks, record, newest, worker)
    while record.counts[BUSY]:
        worker = tasks.heap[0] % len(tasks.rows)
        row = tasks.rows[worker]
        if row.number != tasks.heap[0]:  # cancelled
            _remove_first(tasks, record)
            continue
        now_s = tasks.heap_s[0]
        record.counts[ARRIVALS] += 1
        record.sums[BUSY_S] += now_s - row.begun_s
        record.sums[USEFUL_S] += now_s - row.begun_s
        _add_time(row, costs, record, now_s - row.assigned_s)
        other = np.int64(row.copy)
        row.copy = NONE
        if left:  # then no lease has a copy
            samples = min(left, opening.later)
            left -= samples
            end_s = _begin(tasks, record, trips, worker, samples=samples, assigned_s=now_s, begun_s=now_s)
            _replace_first(tasks, record, end_s, row.number)
            newest = _note_once(tasks, record, newest, worker)
            continue
        _remove_first(tasks, record)
        _become_idle(tasks, record, worker)
        if other != NONE:
            _cancel(tasks, record, other, now_s)
        for idle in (worker, other):
            while oldest < newest and not _is_once(tasks, record, oldest):
                oldest += 1
            if idle != NONE and opening.repeats and oldest < newest:
                slow = record.once[oldest]
                tasks.rows[idle].copy = slow
                tasks.rows[slow].copy = idle
                samples = tasks.rows[slow].samples
                end_s = _begin(tasks, record, trips, idle, samples=samples, assigned_s=now_s, begun_s=now_s)
                _push(tasks, record, end_s, tasks.rows[idle].number)
                record.counts[BUSY] += 1
    return now_s
