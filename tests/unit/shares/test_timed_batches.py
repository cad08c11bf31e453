"""Marks by which ranks see that they divide the same samples alike."""

from math import nan

import pytest
from torch.utils.data import BatchSampler, DistributedSampler

from paceline.errors import UsageError
from paceline.shares.batches import CutSampler, divided
from paceline.shares.division import own_batch
from paceline.shares.timed_batches import TimedBatches, check_marks

RANKS = 2


def mark_of(*dealt, ahead=0):
    return TimedBatches(list(dealt), [], 0.0, is_first=False, divisor=nan, ahead=ahead).mark


def dealt_by(rank, seed=3, skipped=0, epoch=0):
    """Return how the batches of an epoch are divided, of which a rank has skipped the first ones."""
    sampler = DistributedSampler(range(48), RANKS, rank, seed=seed)
    sampler.set_epoch(epoch)
    cutting = CutSampler(BatchSampler(sampler, 4, False), RANKS, lambda batches: own_batch(batches, rank))
    list(cutting)
    return list(cutting.dealt)[skipped:]


def test_ranks_that_divide_the_same_samples_have_the_same_marks():
    marks = [[mark_of(dealt) for dealt in dealt_by(rank)] for rank in range(RANKS)]
    assert marks[0] == marks[1]
    assert len(set(marks[0])) == len(marks[0])
    check_marks(zip(*marks, strict=True))


@pytest.mark.parametrize("other", [{"seed": 4}, {"skipped": 1}, {"epoch": 1}])
def test_ranks_that_divide_other_samples_are_refused_though_their_shares_are_the_same(other):
    first, second = dealt_by(0)[0], dealt_by(1, **other)[0]
    assert first.samples == second.samples
    with pytest.raises(UsageError, match="do not divide the same samples"):
        check_marks([(mark_of(first), mark_of(second))])


def test_a_rank_that_is_lost_has_no_mark():
    mark = mark_of(dealt_by(0)[0])
    check_marks([(mark, nan), (nan, mark)])


def test_a_rank_that_has_taken_more_batches_is_refused():
    (dealt,) = dealt_by(0)[:1]
    with pytest.raises(UsageError, match="same number of batches"):
        check_marks([(mark_of(dealt), mark_of(dealt, ahead=1))])


def test_other_shares_of_the_same_samples_are_refused():
    with pytest.raises(UsageError):
        check_marks([(mark_of(divided((1, 3), 2)), mark_of(divided((2, 2), 2)))])


def test_samples_without_numbers_are_taken_for_the_same():
    class Named(DistributedSampler):
        def __iter__(self):
            return (f"sample {index}" for index in super().__iter__())

    def deal(batches):
        return own_batch(batches, 0)

    cuttings = [
        CutSampler(BatchSampler(Named(range(8), RANKS, 0, seed=seed), 2, False), RANKS, deal) for seed in (1, 2)
    ]
    marks = []
    for cutting in cuttings:
        list(cutting)
        marks.append([mark_of(each) for each in cutting.dealt])
    assert marks[0] == marks[1]
