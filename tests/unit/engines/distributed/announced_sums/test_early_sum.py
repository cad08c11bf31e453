"""Early sums: which rounds are used, which buckets there are, and in which order their sums begin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from early_uses import NotedGroup
from paceline.engines.distributed.announced_sums.early_rounds import EarlyRounds
from paceline.engines.distributed.announced_sums.early_sum import EarlySum, make_buckets
from paceline.engines.distributed.transport.announced_messages import SummedGradient
from paceline.errors import RunError
from paceline.tensors.flat_buffers import FlatLayout


class Mixed(nn.Module):
    """Model with parameters of two dtypes in turns, and buffers of three kinds."""

    def __init__(self, sizes):
        super().__init__()
        dtypes = [torch.float32, torch.float64]
        self.parts = nn.ParameterList(
            nn.Parameter(torch.zeros(size, dtype=dtypes[i % 2])) for i, size in enumerate(sizes)
        )
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("position", torch.tensor(0))


def made(sizes=(3, 4, 5), **group):
    layout = FlatLayout(Mixed(sizes))
    gradient = layout.allocate()
    for number, each in enumerate(gradient.parameters, 1):
        each.fill_(number)
    for each in gradient.flat_buffers:
        each.fill_(6)
    return EarlySum(layout, gradient), gradient, NotedGroup(**group)


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 2)))
def test_what_was_begun_in_a_group_is_not_used_in_the_next_one(late):
    """Rank 1 leaves within an update; the others tell before or after that they have begun with their gradients."""
    rounds = EarlyRounds(is_certain=True)
    rounds.form(1, {0, 1, 2})
    assert [rounds.give(worker, version=0) for worker in range(3)] == [1] * 3
    for worker in {0, 1, 2} - late:
        rounds.begun(worker, draw=4)
    rounds.form(2, {0, 2})
    for worker in late:
        rounds.begun(worker, draw=4)
    gradients = [SummedGradient(worker, 4, 8.0, at=worker) for worker in (0, 2)]
    assert rounds.generation_of(gradients) == 0
    assert [rounds.give(worker, version=1) for worker in (0, 2)] == [2, 2]
    for worker in (0, 2):
        rounds.begun(worker, draw=5)
    assert rounds.generation_of([each._replace(draw=5) for each in gradients]) == 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 400))
def test_buckets_have_each_element_once_from_the_last_parameter_to_the_first(sizes, nbytes):
    layout = FlatLayout(Mixed(sizes))
    flat = layout.allocate()
    buckets = make_buckets(layout.parameter_ranges(), flat, nbytes)
    for each in buckets:
        flat.flat_parameters[each.vector][each.start : each.stop] += 1
    assert all(bool((each == 1).all()) for each in flat.flat_parameters)
    numbers = [min(each.parameters) for each in buckets]
    assert numbers == sorted(numbers, reverse=True)
    assert sorted(number for each in buckets for number in each.parameters) == list(range(len(sizes)))


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(3)), st.integers(0, 3))
def test_the_sums_begin_in_one_order_whatever_is_complete_first(order, complete):
    early, gradient, group = made()
    early.begin(group)
    for parameter in order[:complete]:
        early.on_accumulated(parameter)
    waiting = [number for number in (2, 1, 0) if number not in order[:complete]]
    assert len(group.begun) == (2 - waiting[0] if waiting else 3)
    assert early.end()
    early.wait()
    assert [each.numel() for each in group.begun[:3]] == [5, 4, 3]
    for total, own in zip(early.total.parameters, gradient.parameters, strict=True):
        assert torch.equal(total, own / 2)


def test_buffers_are_averaged_or_those_of_the_first_rank():
    for rank, expected in ((0, [3.0, 6.0]), (1, [3.0, 0.0])):
        early, _, group = made(rank=rank)
        early.begin(group)
        early.end()
        assert [float(each.reshape(-1)[0]) for each in early.total.flat_buffers] == expected


def test_a_gradient_that_changes_after_its_bucket_is_no_part_of_the_sum():
    early, _, group = made()
    early.begin(group)
    early.on_accumulated(0)
    early.on_accumulated(0)  # its bucket waits for the others
    assert early.end()
    early.begin(group)
    early.on_accumulated(2)
    early.on_accumulated(2)
    assert not early.end()
    assert len(group.begun) == 2 * (3 + 2), "it takes part in all sums"
    assert not early.end(), "once"


def test_a_gradient_that_is_taken_is_copied_only_if_the_sum_is_not_used():
    early, gradient, group = made()
    taken = [torch.full_like(each, 10.0 + i) for i, each in enumerate(gradient.parameters)]
    before = gradient.memory.clone()
    early.begin(group)
    norms = [early.take(i, each) for i, each in enumerate(taken)]
    assert list(map(float, norms)) == [300.0, 484.0, 720.0]
    assert early.take(2, taken[2]) is None, "its sum has begun"
    assert early.end()
    for total, own in zip(early.total.parameters, taken, strict=True):
        assert torch.equal(total, own / 2)
    assert torch.equal(gradient.memory, before)
    early.complete_gradient()
    assert all(map(torch.equal, gradient.parameters, taken))


def test_a_taken_gradient_that_is_changed_before_it_is_copied_is_refused():
    early, gradient, group = made()
    taken = torch.ones_like(gradient.parameters[0])
    early.begin(group)
    early.take(0, taken)
    early.end()
    taken.mul_(2)
    with pytest.raises(RunError, match=r"changed in place after optimizer\.step\(\)"):
        early.complete_gradient()


def test_a_gradient_of_another_kind_is_not_taken():
    early, gradient, group = made()
    assert early.take(0, gradient.parameters[0].clone()) is None, "there is no early sum"
    early.begin(group)
    assert early.take(0, gradient.parameters[0].double()) is None
    early.end()
    early.complete_gradient()
    assert float(gradient.parameters[0][0]) == 1


def test_memory_of_a_sum_that_was_not_used_is_left_to_it():
    early, _, group = made()
    early.begin(group)
    early.end()
    first = early.total
    early.begin(group)
    assert early.total is not first
    early.end()
    early.wait()
    second = early.total
    early.begin(group)
    assert early.total is second


def test_a_group_that_is_gone_or_not_there_sums_nothing():
    early, _, group = made(fails=True)
    early.begin(group)
    early.on_accumulated(2)
    assert not early.end()
    early.begin(None)
    early.on_accumulated(2)
    assert not early.end()


def test_a_round_that_a_member_has_missed_ends_early_sums_until_the_next_group():
    def round_of(version, workers=(0, 1)):
        given = [rounds.give(worker, version) for worker in workers]
        for worker in workers:
            rounds.begun(worker, version + 1)
        return given, rounds.generation_of([SummedGradient(worker, version + 1, 4.0, at=worker) for worker in workers])

    rounds = EarlyRounds(is_certain=True)
    assert round_of(0) == ([0, 0], 0), "there is no group"
    rounds.form(3, {0, 1})
    assert rounds.give(1, 0) == 0, "the other member may have its task of this version"
    assert round_of(1) == ([3, 3], 3)
    assert round_of(2) == ([3, 3], 3)
    assert round_of(3, [0]) == ([3], 0)
    assert round_of(4) == ([0, 0], 0)
    rounds.form(4, {0, 1})
    assert round_of(5) == ([4, 4], 4)
    assert rounds.give(0, 6) == 4
    assert rounds.give(0, 6) == 0, "a second task at one version"
    assert round_of(7) == ([0, 0], 0)
    rounds.form(5, {0, 1})
    assert rounds.give(2, 8) == 0, "no member"


def test_only_the_gradients_of_a_whole_round_with_equal_weights_are_used():
    rounds = EarlyRounds(is_certain=True)
    rounds.form(1, {0, 1})
    for worker in (0, 1):
        rounds.give(worker, 0)
        rounds.begun(worker, 1)
    first, second = (SummedGradient(worker, 1, 4.0, at=worker) for worker in (0, 1))
    assert rounds.generation_of([first, second]) == 1
    assert rounds.generation_of([first]) == 0
    assert rounds.generation_of([first, second._replace(weight=3.0)]) == 0
    assert rounds.generation_of([first, second._replace(draw=2)]) == 0
    assert rounds.generation_of([first, second._replace(at=0)]) == 0
    certain = EarlyRounds(is_certain=False)
    certain.form(1, {0, 1})
    assert certain.give(0, 0) == 0
