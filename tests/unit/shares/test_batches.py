"""Cutting of an update's batches by shares."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler

from paceline.errors import UsageError
from paceline.shares.batches import CutSampler, cut, cut_for, divided
from paceline.shares.rank_batches import is_dealt_by_rank

EQUAL = divided((4, 4, 4), 4)


@st.composite
def shared_batches(draw):
    ranks, size = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    batches = [[(rank, each) for each in range(size)] for rank in range(ranks)]
    ends = sorted(draw(st.lists(st.integers(0, ranks * size), min_size=ranks - 1, max_size=ranks - 1)))
    shares = [end - begin for begin, end in zip([0, *ends], [*ends, ranks * size], strict=True)]
    return batches, shares


@given(shared_batches())
def test_each_sample_is_dealt_once_and_a_rank_keeps_its_own_first(given):
    batches, shares = given
    dealt = [cut(batches, shares, rank) for rank in range(len(shares))]
    assert [len(each) for each in dealt] == shares
    assert sorted(sample for each in dealt for sample in each) == sorted(sample for each in batches for sample in each)
    kept = [min(share, len(batches[0])) for share in shares]
    assert all(each[:count] == own[:count] for each, own, count in zip(dealt, batches, kept, strict=True))


@given(shared_batches())
def test_each_sample_is_dealt_once_where_ranks_are_lost(given):
    batches, shares = given
    dealt = [cut_for(batches, shares, shares, rank) for rank in range(len(shares))]
    assert [sample for own, _ in dealt for sample in own] == [sample for each in batches for sample in each]
    for rank, (own, division) in enumerate(dealt):
        assert len(own) == division.samples[rank] == shares[rank]
        assert division.weight(rank) == shares[rank] / len(batches[0])


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


class OwnSampler(DistributedSampler):
    """Sampler of a user, in reversed order: its copies are asked one by one."""

    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


@pytest.mark.parametrize("sampler_type", [DistributedSampler, OwnSampler])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [50, 48, 7])
def test_without_shares_a_rank_reads_its_own_batches(sampler_type, shuffle, drop_last, count):
    for rank in range(3):
        own = sampler_type(Numbers(count), 3, rank, shuffle=shuffle, seed=4, drop_last=drop_last)
        own.set_epoch(5)
        batches = BatchSampler(own, 4, drop_last)
        cutting = CutSampler(batches, 3, lambda each, rank=rank: (each[rank], EQUAL))
        assert is_dealt_by_rank(batches, 3)
        assert list(cutting) == list(batches)
        assert len(cutting) == len(batches)


@pytest.mark.parametrize("sampler_type", [DistributedSampler, OwnSampler])
def test_with_shares_an_update_has_the_samples_of_equal_ones(sampler_type):
    def batches_of(rank, shares):
        sampler = sampler_type(Numbers(50), 3, rank, seed=4)

        def deal(batches):
            return (cut(batches, shares, rank) if shares and len(batches[0]) == 4 else batches[rank]), EQUAL

        return list(CutSampler(BatchSampler(sampler, 4, False), 3, deal))

    equal = [batches_of(rank, None) for rank in range(3)]
    shared = [batches_of(rank, (1, 5, 6)) for rank in range(3)]
    for update, batches in enumerate(zip(*shared, strict=True)):
        before = [each[update] for each in equal]
        assert sorted(chain(*batches)) == sorted(chain(*before))
        is_whole = len(before[0]) == 4
        assert [len(each) for each in batches] == ([1, 5, 6] if is_whole else [len(each) for each in before])


def test_samplers_that_do_not_know_their_rank_are_not_cut():
    assert not is_dealt_by_rank(BatchSampler(torch.utils.data.SequentialSampler(range(9)), 2, False), 3)
    assert not is_dealt_by_rank(BatchSampler(DistributedSampler(Numbers(9), 2, 0), 2, False), 3)


class DealsBatches:
    """Batch sampler that deals the batches of another one to the ranks, as Accelerate's does."""

    def __init__(self, batch_sampler, ranks, rank):
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, ranks, rank

    def __iter__(self):
        return (
            batch
            for number, batch in enumerate(self.batch_sampler)
            if number % self.num_processes == self.process_index
        )


def test_batches_that_are_drawn_once_for_all_ranks_are_drawn_once():
    def shuffled(seed):
        generator = torch.Generator().manual_seed(seed)
        return BatchSampler(torch.utils.data.RandomSampler(range(48), generator=generator), 4, True)

    equal = [list(DealsBatches(shuffled(3), 3, rank)) for rank in range(3)]
    cutting = [
        CutSampler(DealsBatches(shuffled(3), 3, rank), 3, lambda each, rank=rank: (each[rank], EQUAL))
        for rank in range(3)
    ]
    assert [list(each) for each in cutting] == equal


class Forgetful(DistributedSampler):
    """Sampler that draws from one generator, which goes on."""

    generator = torch.Generator().manual_seed(0)

    def __iter__(self):
        return iter(
            torch.randperm(len(self.dataset), generator=self.generator).tolist()[self.rank :: self.num_replicas]
        )


def test_a_sampler_that_draws_anew_is_refused():
    cutting = CutSampler(BatchSampler(Forgetful(Numbers(48), 3, 0), 4, True), 3, lambda each: (each[0], EQUAL))
    with pytest.raises(UsageError, match="Forgetful draws other samples at each pass"):
        next(iter(cutting))
