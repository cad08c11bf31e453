"""Data as they come: samplers of the user, whose items are dealt to the ranks."""

import random
from collections import Counter
from itertools import count, pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import paceline as pl
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import BATCH, SAMPLES
from paceline.user_loop.data.dealt_batches import OwnOrder
from paceline.worker.seeding import RandomStates
from selections import each_value_once, parametrize_few

EPOCHS, RANKS, EXACT = 3, 2, 1e-12


class Numbers(nn.Module):
    """Parameter whose gradient is the number of times that each sample is in the batch."""

    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))


class ByEpoch(Sampler):
    """Order that the loop names by its epoch."""

    epoch = 0

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def set_epoch(self, epoch):
        self.epoch = epoch


class WithState(Sampler):
    """Order of a generator that goes on from epoch to epoch."""

    def __init__(self, seed=5):
        self.random = random.Random(seed)

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(self.random.sample(range(SAMPLES), SAMPLES))


class Buckets(Sampler):
    """Batches of 1, 2, 3 ... samples in an order that its generator draws."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(random.SystemRandom().randrange(2**32))
        ends = [0, 1, 3, 6, 10, 15, 21, 28, 36, 45, SAMPLES]
        self.batches = [list(range(start, end)) for start, end in pairwise(ends)]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter([self.batches[number] for number in torch.randperm(len(self), generator=self.generator).tolist()])


class OwnBatches(BatchSampler):
    """Subclass, which may have another order."""


def evens():
    return SubsetRandomSampler(range(0, SAMPLES, 2))


ONCE = {
    "by epoch": lambda: {"batch_size": BATCH, "sampler": ByEpoch()},
    "with state": lambda: {"batch_size": BATCH, "sampler": WithState()},
    "some": lambda: {"batch_size": BATCH, "sampler": evens()},
    "buckets": lambda: {"batch_sampler": Buckets()},
    "own batches of an order": lambda: {"batch_sampler": OwnBatches(ByEpoch(), BATCH, drop_last=False)},
    "a list of batches": lambda: {"batch_sampler": [[0, 1, 2], [5], [7, 9]]},
    "no batches": lambda: {"batch_size": None, "sampler": evens()},
}


def make_parts(loader):
    model = Numbers()
    return model, torch.optim.SGD(model.parameters(), lr=1.0), loader


def used(accumulate=1):
    """Return a loop that returns the samples of each of its batches."""

    def loop(run, model, optimizer):
        batches = []
        for _ in run.epochs(EPOCHS):
            for number, numbers in enumerate(run.loader, 1):
                batches.append(torch.as_tensor(numbers).reshape(-1))
                (-model.counts[batches[-1]].sum()).backward()
                if number % accumulate == 0:
                    optimizer.step()
        return [each.tolist() for each in batches]

    return loop


@parametrize_few(
    ("name", "way"),
    each_value_once(list(ONCE), [("k_sync(k=1)", AttachedThreads), ("all_reduce", AllReduceLoops)]),
    keep=4,
)
def test_every_item_of_a_sampler_is_used_once_an_epoch(name, way):
    protocol, kind = way
    loader = DataLoader(range(SAMPLES), **ONCE[name]())
    once = Counter(torch.cat([torch.as_tensor(each).reshape(-1) for each in loader]).tolist())
    ranks = kind(RANKS, lambda: make_parts(DataLoader(range(SAMPLES), **ONCE[name]())), protocol)
    answers = ranks.run(used())
    assert not [each for each in answers if isinstance(each, BaseException)], answers
    if kind is AttachedThreads:  # which deals a batch anew whose gradient was dropped
        expected = [EPOCHS * once[sample] for sample in range(SAMPLES)]
        assert all(model.counts.tolist() == expected for model, _, _ in ranks.parts)
    else:
        assert Counter(sample for batches in answers for batch in batches for sample in batch) == {
            sample: EPOCHS * times for sample, times in once.items()
        }


def test_batches_of_a_batch_sampler_stay_whole():
    parts = lambda: make_parts(DataLoader(range(SAMPLES), batch_sampler=Buckets()))  # noqa: E731
    answers = AttachedThreads(RANKS, parts, "bsp", accumulate=2).run(used(accumulate=2))
    whole = sorted(Buckets().batches)
    assert sorted(batch for batches in answers for batch in batches) == sorted(whole * EPOCHS)


def test_a_sampler_with_weights_draws_the_same_on_all_ranks():
    weights = torch.arange(SAMPLES).double()
    parts = lambda: make_parts(  # noqa: E731
        DataLoader(range(SAMPLES), BATCH, sampler=WeightedRandomSampler(weights, 40))
    )
    ranks = AttachedThreads(RANKS, parts, "k_sync(k=1)")
    ranks.run(used())
    counts = ranks.parts[0][0].counts
    assert counts.sum() == EPOCHS * 40
    assert counts[0] == 0
    assert counts[SAMPLES // 2 :].sum() > 1.5 * counts[: SAMPLES // 2].sum()


class OfGlobalGenerators(Sampler):
    """Order that the global generators of Python, NumPy and torch draw."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([random.randrange(1000), int(np.random.randint(1000)), int(torch.randint(1000, ()))])


def test_an_order_of_the_global_generators_is_the_same_on_all_ranks_and_leaves_them_as_they_were():
    before = RandomStates()
    first, second = OwnOrder(OfGlobalGenerators(), 1), OwnOrder(OfGlobalGenerators(), 1)
    orders = [first.epoch(number) for number in range(5)]
    torch.rand(1)
    random.random()
    assert second.epoch(4) == orders[4]
    assert second.epoch(3) == orders[3]
    assert len(set(map(tuple, orders))) == 5
    assert OwnOrder(OfGlobalGenerators(), 2).epoch(0) != orders[0]
    before_again = RandomStates()
    assert before != before_again
    first.epoch(9)
    assert RandomStates() == before_again


def test_an_old_epoch_is_drawn_again_where_the_sampler_can_name_it():
    named, with_state = OwnOrder(ByEpoch(), 1), OwnOrder(WithState(), 1)
    first, drawn = named.epoch(0), with_state.epoch(0)
    for number in range(5):
        named.epoch(number)
        with_state.epoch(number)
    assert named.epoch(0) == first
    assert named.epoch(4) != first
    assert with_state.epoch(2) != drawn
    with pytest.raises(pl.UsageError, match=r"epoch 1 is dealt again, whose order the WithState .* give it a method"):
        with_state.epoch(1)


class Shrinking(ByEpoch):
    """Order with fewer samples in each epoch."""

    def __iter__(self):
        return iter(range(SAMPLES - self.epoch))


class Growing(list):
    """Data set that gets another sample while it is read."""


def test_an_epoch_of_another_length_is_refused():
    parts = lambda: make_parts(DataLoader(range(SAMPLES), BATCH, sampler=Shrinking()))  # noqa: E731
    answers = AttachedThreads(1, parts, "bsp").run(used())
    assert "Shrinking of the loader gives 47 items in epoch 1, and has a length of 48" in str(answers[0])

    def loop(run, model, optimizer):
        for _ in run.epochs(EPOCHS):
            for numbers in run.loader:
                (-model.counts[numbers].sum()).backward()
                optimizer.step()
            run.loader._loader.dataset.append(7)

    parts = lambda: make_parts(DataLoader(Growing(range(SAMPLES)), BATCH))  # noqa: E731
    answers = AttachedThreads(1, parts, "bsp").run(loop)
    assert "the data set had 48 samples, and has 49 now" in str(answers[0])


def test_ranks_with_other_orders_are_refused():
    numbers = count()
    parts = lambda: make_parts(DataLoader(range(SAMPLES), BATCH, sampler=WithState(next(numbers))))  # noqa: E731
    ranks = AttachedThreads(RANKS, parts, "bsp")
    with pytest.raises(pl.UsageError, match=r"worker 1 .* differs from rank 0: order of the samples WithState"):
        ranks.run(used())


def test_the_order_of_a_sampler_can_be_cut():
    parts = lambda: make_parts(DataLoader(range(SAMPLES), 8, sampler=ByEpoch()))  # noqa: E731

    def loop(run, model, optimizer):
        for _ in run.epochs(EPOCHS):
            for numbers in run.loader:
                optimizer.zero_grad()
                (-model.counts[numbers]).mean().backward()
                optimizer.step()

    ranks = AttachedThreads(RANKS, parts, "balanced(m=4)")
    ranks.run(loop)
    counts = ranks.parts[0][0].counts * 16  # samples of an update
    torch.testing.assert_close(counts, torch.full_like(counts, EPOCHS))
