"""Waiting and stragglers of DDP recordings."""

import numpy as np
import pytest

from ddp_recordings import write_recording
from paceline.ddp_recording.recording import DDPRecording
from paceline.ddp_recording.waiting import find_stragglers, slow_ranks, time_shares

STEPS = 100


def recorded(folder, work_ms, **options):
    return DDPRecording(write_recording(folder, work_ms, **options))


def with_slow(rank, excess_ms, steps=slice(None), ranks=4):
    work_ms = np.full((ranks, STEPS), 100.0) + np.random.default_rng(0).normal(0, 1, (ranks, STEPS))
    work_ms[rank, steps] += excess_ms
    return work_ms


def test_the_time_is_work_sums_and_waiting(tmp_path):
    shares = time_shares(recorded(tmp_path, [[50.0] * 20, [80.0] * 20], sum_ms=5.0))
    assert shares.working_s == pytest.approx(20 * 0.130)
    assert shares.summing_s == pytest.approx(20 * 2 * 0.005)
    assert shares.waiting_s == pytest.approx(20 * 0.030)
    assert shares.waiting_share == pytest.approx(0.030 / 0.170)


@pytest.mark.parametrize("part", ["data", "forward", "backward"])
def test_a_persistent_straggler_is_named_with_its_part_and_excess(part, tmp_path):
    [straggler] = find_stragglers(recorded(tmp_path, with_slow(2, 100.0), part=part, hosts=list("aabb")))
    assert (straggler.rank, straggler.host, straggler.part) == (2, "b", part)
    assert straggler.is_persistent
    assert straggler.steps_share >= 0.99
    assert straggler.excess_s == pytest.approx(0.1, rel=0.05)
    assert straggler.part_excess_s == pytest.approx(0.1, rel=0.05)
    assert straggler.cost_s == pytest.approx(0.1, rel=0.05)


def test_a_transient_straggler_is_named_with_its_episodes(tmp_path):
    work_ms = with_slow(1, 60.0, slice(10, 15))
    work_ms[1, 70:80] += 60.0
    [straggler] = find_stragglers(recorded(tmp_path, work_ms))
    assert (straggler.rank, straggler.episodes, straggler.steps_share) == (1, 2, 0.15)
    assert not straggler.is_persistent


def test_the_most_expensive_straggler_comes_first(tmp_path):
    work_ms = with_slow(1, 40.0, slice(0, 20)) + with_slow(3, 150.0, slice(20, 100)) - 100
    assert [each.rank for each in find_stragglers(recorded(tmp_path, work_ms))] == [3, 1]


def test_no_rank_is_named_without_a_straggler(tmp_path):
    assert find_stragglers(recorded(tmp_path, with_slow(0, 0.0))) == []


def test_two_slow_ranks_of_four_are_both_slower_than_the_median(tmp_path):
    named = slow_ranks(np.array([[1.0], [1.0], [2.0], [2.1]]))
    assert named.tolist() == [3]


def test_one_of_two_ranks_is_slow(tmp_path):
    assert slow_ranks(np.array([[1.0, 2.0, 1.0], [2.0, 1.0, 1.1]])).tolist() == [1, 0, -1]
