"""Limits of a rank: a scripted device, and what is known of the others."""

from math import inf, nan

import pytest
import torch

from paceline.policies.share_limits import MOST_SIZES, ShareLimits
from paceline.policies.shares import Pieces
from paceline.shares.rank_limits import RankLimits, WorkLimit, is_compiling, memory_of

SIZES = Pieces(16, pieces=8)  # 24 samples at most


class Device:
    """Device of 100 bytes, of which a model takes some, and each sample of the largest batch some."""

    def __init__(self, fixed, of_sample):
        self.fixed, self.of_sample, self.largest, self.reads = fixed, of_sample, 16, 0

    def __call__(self):
        self.reads += 1
        return self.fixed + self.of_sample * self.largest, 100


def risen(device, updates=20):
    """Return the limits that a rank has after each update, if its share is as large as it may be."""
    limits, found, known = RankLimits(SIZES, device), [], set()
    for _ in range(updates):
        is_first = device.largest not in known
        known.add(device.largest)
        most, _ = limits.update_ended(device.largest, is_first=is_first)
        found.append(most)
        device.largest = max(device.largest, int(most))
    return found


def test_the_limit_rises_by_a_piece_for_each_new_size():
    assert risen(Device(10, 1))[:6] == [18, 20, 22, 24, 24, 24]


def test_the_limit_stops_where_nine_tenths_of_the_device_are_taken():
    device = Device(10, 3.5)  # 87 bytes of 100 with 22 samples, 94 with 24
    assert risen(device)[-1] == 22


def test_a_device_that_equal_shares_fill_has_no_more():
    assert set(risen(Device(95, 0.1))) == {16}


def test_the_memory_is_read_after_new_sizes_only():
    device = Device(95, 0.1)
    risen(device, updates=50)
    assert device.reads == 2


def test_the_state_of_an_optimizer_counts_that_is_made_after_the_first_update():
    device = Device(10, 1)
    limits = RankLimits(SIZES, device)
    assert limits.update_ended(16, is_first=True)[0] == 18
    device.fixed = 80
    assert limits.update_ended(16, is_first=False)[0] == 16


def test_a_rank_without_such_a_device_has_the_largest_size():
    assert memory_of(torch.device("cpu")) is None
    assert RankLimits(SIZES, None).update_ended(16, is_first=True)[0] == 24


def test_the_limits_of_all_ranks_are_theirs_and_one_compiler_is_enough():
    limits = RankLimits(SIZES, None)
    assert limits.of_ranks([[24.0, 0.0], [18.0, 0.0]]) == ShareLimits((24, 18), is_compiled=False)
    assert limits.of_ranks([[24.0, 0.0], [nan, nan], [20.0, 1.0]]) == ShareLimits((24, 24, 20), is_compiled=True)


def test_the_work_of_a_rank_rises_by_a_piece_until_its_device_is_full():
    device, found = Device(10, 3.5), []
    limit, work = WorkLimit(8, device), 16.0
    for _ in range(12):
        device.largest = work
        found.append(limit.update_ended(work))
        work = max(work, found[-1])
    assert found[:2] == [18.0, pytest.approx(20.25)]
    assert found[-1] == pytest.approx(work) == pytest.approx((90 - 10) / 3.5, rel=0.01)
    assert device.reads < 24


def test_work_without_such_a_device_has_no_limit_until_it_runs_out_of_memory():
    limit = WorkLimit(8, None)
    assert limit.update_ended(100.0) == inf
    assert not limit.fall(100.0, equal_work=100.0)
    assert limit.fall(180.0, equal_work=100.0)
    assert limit.update_ended(100.0) == 160.0


@pytest.mark.slow
def test_a_compiled_model_of_every_size_that_a_policy_takes_is_not_given_up():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    assert not is_compiling()
    model = torch.compile(torch.nn.Linear(3, 3), dynamic=False, fullgraph=True)
    for size in range(MOST_SIZES + 1):  # the last batch of an epoch may be of a seventh size
        model(torch.ones(10 + size, 3))
    assert is_compiling()
    assert counters["stats"]["unique_graphs"] == MOST_SIZES + 1
    model(torch.ones(30, 3))
    with pytest.raises(Exception, match="fullgraph"):
        model(torch.ones(31, 3))
    torch._dynamo.reset()


def test_a_batch_that_equal_shares_need_does_not_fall():
    limits = RankLimits(Pieces(16), memory=None)
    assert not limits.fall(22, equal=22.0)  # of a rank among fewer than all: it would be dealt as many again
    assert limits.fall(24, equal=22.0)
