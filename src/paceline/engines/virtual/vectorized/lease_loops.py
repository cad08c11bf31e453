"""Loop over the leases of an update, which numba compiles."""

from __future__ import annotations

from paceline.engines.virtual.vectorized.lease_arrays import (
    ARRIVALS,
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


@compiled
def _is_earlier(tasks, end_s, order, place):  # type: ignore[no-untyped-def]
    """Return whether a task ends before the one at a place of the heap."""
    if end_s == tasks.heap_s[place]:
        return order < tasks.order[tasks.heap[place]]
    return end_s < tasks.heap_s[place]


@compiled
def _put(tasks, place, worker, end_s):  # type: ignore[no-untyped-def]
    tasks.heap[place] = worker
    tasks.heap_s[place] = end_s
    tasks.place[worker] = place


@compiled
def _move_up(tasks, worker, place):  # type: ignore[no-untyped-def]
    """Put a worker at a place of the heap, or at an earlier one."""
    end_s, order = tasks.due_s[worker], tasks.order[worker]
    while place and _is_earlier(tasks, end_s, order, (place - 1) // 2):
        parent = (place - 1) // 2
        _put(tasks, place, tasks.heap[parent], tasks.heap_s[parent])
        place = parent
    _put(tasks, place, worker, end_s)
    return place


@compiled
def _move_down(tasks, worker, place, size):  # type: ignore[no-untyped-def]
    """Put a worker at a place of the heap, or at a later one."""
    end_s, order = tasks.due_s[worker], tasks.order[worker]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _is_earlier(tasks, tasks.heap_s[child + 1], tasks.order[tasks.heap[child + 1]], child):
            child += 1
        if _is_earlier(tasks, end_s, order, child):
            break
        _put(tasks, place, tasks.heap[child], tasks.heap_s[child])
        place = child
    _put(tasks, place, worker, end_s)


@compiled
def _remove(tasks, record, worker):  # type: ignore[no-untyped-def]
    """Remove the task of a worker, which is idle from now on."""
    record.counts[HEAP] -= 1
    size, place = record.counts[HEAP], tasks.place[worker]
    last = tasks.heap[size]
    tasks.place[worker] = NONE
    if last != worker:
        _move_down(tasks, last, _move_up(tasks, last, place), size)
    tasks.idle_since[worker] = record.counts[IDLE]
    record.counts[IDLE] += 1


@compiled
def _begin(tasks, record, trips, worker, samples, assigned_s, begun_s):  # type: ignore[no-untyped-def]
    """Let a lease of a worker begin, which is not in the heap, or at its old place."""
    lease_s = trips.work_s[worker]
    if samples != trips.size:
        fixed_s = min(trips.cost_s, lease_s)
        lease_s = fixed_s + (lease_s - fixed_s) * (samples / trips.size)
    tasks.due_s[worker] = begun_s + (trips.network_s + lease_s)
    tasks.order[worker] = record.counts[ORDER]
    tasks.assigned_s[worker] = assigned_s
    tasks.begun_s[worker] = begun_s
    tasks.samples[worker] = samples
    record.counts[ORDER] += 1
    record.counts[PULLS] += 1


@compiled
def _give(tasks, record, trips, worker, samples, now_s):  # type: ignore[no-untyped-def]
    """Give a worker a further lease, which has ended its last one at the top of the heap, or has none."""
    _begin(tasks, record, trips, worker, samples=samples, assigned_s=now_s, begun_s=now_s)
    size = record.counts[HEAP]
    if tasks.place[worker] == NONE:
        record.counts[HEAP] += 1
        _move_up(tasks, worker, size)
    else:
        _move_down(tasks, worker, 0, size)


# --- an update --------------------------------------------------------------------------------------------


@compiled
def _add_cost(times, record, cost_s):  # type: ignore[no-untyped-def]
    """Add the cost of a lease to the latest ones, in whose order their median is found."""
    known, place, ordered_s = record.counts[COSTS_KNOWN], 0, times.ordered_costs_s
    if known == COSTS:
        known -= 1
        while ordered_s[place] != times.costs_s[record.counts[OLDEST_COST]]:
            place += 1
        for later in range(place, known):
            ordered_s[later] = ordered_s[later + 1]
    place = known
    while place and ordered_s[place - 1] > cost_s:
        ordered_s[place] = ordered_s[place - 1]
        place -= 1
    ordered_s[place] = cost_s
    times.costs_s[record.counts[OLDEST_COST]] = cost_s
    record.counts[OLDEST_COST] = (record.counts[OLDEST_COST] + 1) % COSTS
    record.counts[COSTS_KNOWN] = known + 1
    middle = (known + 1) // 2
    median_s = ordered_s[middle] if (known + 1) % 2 else (ordered_s[middle - 1] + ordered_s[middle]) / 2
    record.sums[LEASE_S] = max(0.0, median_s)


@compiled
def _add_time(times, record, worker, samples, seconds):  # type: ignore[no-untyped-def]
    """Add the time of a lease, as `ShareState.add`."""
    first, first_s = times.first_samples[worker], times.first_s[worker]
    if not first:
        times.first_samples[worker], times.first_s[worker] = samples, seconds
    elif samples != first:
        _add_cost(times, record, (seconds * first - first_s * samples) / (first - samples))
    times.samples[worker] += samples
    times.seconds[worker] += max(seconds - record.sums[LEASE_S], seconds / 2)


@compiled
def _note_once(tasks, record, number, worker):  # type: ignore[no-untyped-def]
    """Note that no other worker has the lease that a worker has just taken; return the next number."""
    record.once[number] = worker
    record.taken[number] = tasks.order[worker]
    tasks.copy[worker] = NONE
    return number + 1


@compiled
def _is_once(tasks, record, number):  # type: ignore[no-untyped-def]
    """Return whether a worker still has the lease that it took at this place, and no other worker has a copy."""
    worker = record.once[number]
    return tasks.place[worker] != NONE and tasks.copy[worker] == NONE and record.taken[number] == tasks.order[worker]


@compiled
def _cancel(tasks, record, worker, now_s):  # type: ignore[no-untyped-def]
    """Cancel the lease of a worker, of which another one has ended the copy."""
    tasks.copy[worker] = NONE
    _remove(tasks, record, worker)
    record.sums[BUSY_S] += now_s - tasks.begun_s[worker]
    number = record.counts[CANCELLED]
    record.workers[number] = worker
    record.samples[number] = tasks.samples[worker]
    record.elapsed_s[number] = now_s - tasks.assigned_s[worker]
    record.counts[CANCELLED] += 1


@compiled
def run_update(tasks, times, trips, opening, record):  # type: ignore[no-untyped-def]
    """Deal the leases of an update until each of its samples is used, as `LeaseQueue`; return when that is."""
    record.counts[CANCELLED] = 0
    left, oldest, newest, now_s = opening.left, 0, 0, opening.begun_s
    for worker in opening.idle:
        samples, assigned_s, begun_s = opening.first[worker], opening.assigned_s, opening.begun_s
        _begin(tasks, record, trips, worker, samples=samples, assigned_s=assigned_s, begun_s=begun_s)
        _move_up(tasks, worker, record.counts[HEAP])
        record.counts[HEAP] += 1
        newest = _note_once(tasks, record, newest, worker)
    while record.counts[HEAP]:
        worker = tasks.heap[0]
        now_s = tasks.heap_s[0]
        record.counts[ARRIVALS] += 1
        record.sums[BUSY_S] += now_s - tasks.begun_s[worker]
        record.sums[USEFUL_S] += now_s - tasks.begun_s[worker]
        _add_time(times, record, worker, tasks.samples[worker], now_s - tasks.assigned_s[worker])
        other, tasks.copy[worker] = tasks.copy[worker], NONE
        if left:  # then no lease has a copy
            left -= 1
            _give(tasks, record, trips, worker, samples=1, now_s=now_s)
            newest = _note_once(tasks, record, newest, worker)
            continue
        _remove(tasks, record, worker)
        if other != NONE:
            _cancel(tasks, record, other, now_s)
        for idle in (worker, other):
            while oldest < newest and not _is_once(tasks, record, oldest):
                oldest += 1
            if idle != NONE and opening.repeats and oldest < newest:
                slow = record.once[oldest]
                tasks.copy[idle], tasks.copy[slow] = slow, idle
                _give(tasks, record, trips, idle, samples=tasks.samples[slow], now_s=now_s)
    return now_s
