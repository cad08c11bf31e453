"""Updates of ranks that share samples, as records and back."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.events import Outcome
from paceline.core.records import GradientArrived, RunEnded, RunStarted, UpdateMade
from paceline.recording.event_log import to_line, to_record
from paceline.recording.run_stats import count
from paceline.recording.timed_updates import TimedUpdate, UpdateRecords, timed_updates
from paceline.recording.validation import RecordOrder

RANKS = 3


@st.composite
def runs(draw):
    """Draw updates in a row, of which some have work other than samples, and some times were not measured."""
    found, now_s = [], 0.0
    ranks = sorted(draw(st.sets(st.integers(0, 9), min_size=RANKS, max_size=RANKS)))
    for _ in range(draw(st.integers(1, 5))):
        samples = draw(st.lists(st.integers(1, 30), min_size=RANKS, max_size=RANKS))
        seconds = draw(st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 9.0)), min_size=RANKS, max_size=RANKS))
        work = draw(st.one_of(st.just(samples), st.lists(st.floats(0.1, 99.0), min_size=RANKS, max_size=RANKS)))
        ended_s = now_s + draw(st.floats(1e-3, 20.0))  # the clocks of ranks differ, so it may be less than the seconds
        equal = [sum(samples) / RANKS] * RANKS if work is samples else work[::-1]
        found.append(
            TimedUpdate(
                began_s=now_s,
                ended_s=ended_s,
                ranks=ranks,
                samples=samples,
                seconds=seconds,
                work=work,
                equal_work=equal,
            )
        )
        now_s = ended_s
    return found


@given(runs())
def test_leases_of_a_worker_in_an_update_are_added_up(run):
    writer = UpdateRecords()
    once = [record for update in run for record in writer.of(update)]
    twice = [
        replace(record, samples=record.samples // 2, compute_s=record.compute_s / 2)
        if isinstance(record, GradientArrived)
        else record
        for record in once
        for _ in range(1 + isinstance(record, GradientArrived))
    ]
    for whole, halves in zip(timed_updates(once), timed_updates(twice), strict=True):
        assert halves.samples == [2 * (each // 2) for each in whole.samples]
        assert halves.seconds == whole.seconds
        assert (halves.began_s, halves.ended_s) == (whole.began_s, whole.ended_s)


@given(runs())
def test_a_log_gives_back_the_updates(run):
    writer = UpdateRecords()
    logged = [to_record(to_line(record)) for update in run for record in writer.of(update)]
    assert list(timed_updates(logged)) == run


@given(runs())
def test_the_records_are_those_of_a_run(run):
    writer, order = UpdateRecords(), RecordOrder()
    records = [RunStarted(0.0, RANKS, ""), *(record for update in run for record in writer.of(update))]
    records.append(
        RunEnded(now_s=run[-1].ended_s, outcome=Outcome.STOPPED, reason="", busy_s=writer.busy_s, live_s=writer.live_s)
    )
    for record in records:
        order.check(record)
    stats = count(records)
    assert (stats.updates, stats.used, stats.mean_k) == (len(run), RANKS * len(run), RANKS)
    assert stats.samples_applied == sum(sum(update.samples) for update in run)
    assert 0 <= stats.idle_share <= 1
    assert stats.time_s == run[-1].ended_s


def test_a_rank_that_waits_is_idle_at_the_end_of_the_update():
    update = TimedUpdate(
        began_s=10.0, ended_s=14.0, ranks=range(2), samples=[10, 6], seconds=[1.0, 3.0], work=[10, 6], equal_work=[8, 8]
    )
    first, last, made = UpdateRecords().of(update)
    assert (first.worker, first.now_s, first.compute_s) == (0, 12.0, 1.0)
    assert (last.worker, last.now_s, last.compute_s) == (1, 14.0, 3.0)
    assert [type(each) for each in (first, last, made)] == [GradientArrived, GradientArrived, UpdateMade]
    assert first.sum_s == last.sum_s == 1.0
    assert (made.busy_s, made.live_s, made.samples) == (6.0, 8.0, 16)
    assert update.waiting_s == [2.0, 0.0]


def test_versions_and_sums_go_on():
    writer = UpdateRecords()
    run = [
        TimedUpdate(
            began_s=float(i),
            ended_s=i + 1.0,
            ranks=range(2),
            samples=[4, 4],
            seconds=[0.5, 0.5],
            work=[4, 4],
            equal_work=[4, 4],
        )
        for i in range(3)
    ]
    made = [record for update in run for record in writer.of(update) if isinstance(record, UpdateMade)]
    again = UpdateRecords()
    again.follow(made[0])
    assert [record for update in run[1:] for record in again.of(update) if isinstance(record, UpdateMade)] == made[1:]
    assert all(after.live_s - before.live_s == 2.0 for before, after in pairwise(made))
