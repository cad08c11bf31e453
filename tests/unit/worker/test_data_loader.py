"""Which samples a gradient is made of: the same whatever the timing, every sample once an epoch."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import paceline as pl
from paceline.core.events import Minibatch, MinibatchSlice
from paceline.worker.data_loader import MinibatchLoader, eval_batches, fetch
from selections import parametrize_few
from tiny_jobs import SAMPLES, sgd, tiny_job

BATCH = 8
PER_EPOCH = SAMPLES // BATCH


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, size=SAMPLES):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(float(index))


class Batched(Numbers):
    def minibatch(self, indices):
        return indices.float()


class Counting(nn.Module):
    """Remembers, as its parameter's gradient, how often each sample was seen."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))


def count(model, batch):
    return -model.seen[batch.long()].sum()


def counting_job(**changes):
    return tiny_job(
        **{"model": Counting, "loss": None, "step": count, "optimizer": sgd(lr=1.0), "data": Numbers(), **changes}
    )


def times_applied(protocol, stop, cluster=None, **changes):
    """Return how often each sample entered an update; lr 1 times k makes the mean a sum."""
    job = counting_job(lr_rule="proportional", lr_is="per_worker", **changes)
    result = pl.train(job, protocol=protocol, cluster=cluster or pl.Cluster(3), stop=stop, seed=2)
    return result.model.seen.detach().round().int().tolist()


PROTOCOLS = [pl.bsp(), pl.k_sync(k=2), pl.k_batch_sync(k=3), pl.pull(k=2), pl.asp(), pl.ringmaster(r=1, stops=True)]


def loader(n=3, **changes):
    return MinibatchLoader(counting_job(**changes), 2, n)


def test_sampling_with_replacement_depends_only_on_worker_and_draw():
    one, other = loader(), loader()
    late = [one.batch(1, draw, None).tolist() for draw in (5, 1, 3)]
    early = [other.batch(1, draw, None).tolist() for draw in (1, 3, 5)]
    assert late == [early[2], early[0], early[1]]
    assert one.batch(0, 1, None).tolist() != one.batch(1, 1, None).tolist()


@parametrize_few("protocol", PROTOCOLS, ids=str, keep=1)
def test_epochs_cover_every_sample_under_every_protocol(protocol):
    applied = times_applied(protocol, pl.Stop(epochs=3), sampling="epoch")
    assert sum(applied) >= 3 * SAMPLES
    late = Counter(applied)
    # What is in flight when the run ends belongs to the third epoch; its place was taken from the fourth.
    assert set(late) <= {2, 3, 4}
    assert sum(late[times] for times in (2, 4)) <= 2 * 3 * BATCH + (sum(applied) - 3 * SAMPLES)


def test_one_worker_sees_every_sample_exactly_once_an_epoch():
    assert times_applied(pl.bsp(), pl.Stop(epochs=3), pl.Cluster(1), sampling="epoch") == [3] * SAMPLES


def test_bsp_sees_every_sample_exactly_once_an_epoch():
    assert times_applied(pl.bsp(), pl.Stop(epochs=2), sampling="epoch") == [2] * SAMPLES


@pytest.mark.slow
def test_discarded_minibatches_are_missing_from_the_epoch():
    cluster = pl.Cluster(
        3, timing=[pl.timing.Deterministic(1.0), pl.timing.Deterministic(1.1), pl.timing.Deterministic(3.5)]
    )
    requeued, discarded = (
        times_applied(pl.backup(k=2), pl.Stop(epochs=12), cluster, sampling="epoch", on_drop=on_drop)
        for on_drop in ("requeue", "discard")
    )
    assert set(requeued) <= {11, 12, 13}
    assert min(discarded) < 11


def test_partitions_are_disjoint_and_that_of_a_lost_worker_is_redistributed():
    parts = loader(sharding="partitioned", sampling="epoch")
    shards = [
        {int(x) for number in range(PER_EPOCH // 3) for x in parts.batch(0, 1, Minibatch(shard, 0, number))}
        for shard in range(3)
    ]
    assert len(set.union(*shards)) == SAMPLES == sum(len(shard) for shard in shards)
    lossy = pl.Cluster(3, timing=pl.timing.Deterministic(1.0), faults=[pl.Fault(worker=1, draw=2)])
    applied = times_applied(pl.bsp(), pl.Stop(epochs=2), lossy, sharding="partitioned", sampling="epoch")
    assert all(applied[sample] for sample in shards[1])


def test_partitioned_replacement_stays_in_the_shard():
    parts = loader(sharding="partitioned")
    drawn = [
        {int(x) for draw in range(1, 60) for x in parts.batch(0, draw, Minibatch(s, None, None))} for s in range(3)
    ]
    assert not drawn[0] & drawn[1] | drawn[1] & drawn[2] | drawn[0] & drawn[2]


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_a_sampler_orders_the_epoch(generator):
    ordered = loader(sampling="epoch", sampler=SequentialSampler(range(SAMPLES)))
    assert ordered.batch(0, 1, Minibatch(0, 4, 2)).tolist() == list(range(16, 24))
    weighted = WeightedRandomSampler([1.0] * 8 + [0.0] * (SAMPLES - 8), SAMPLES, generator=generator)
    first, again = (loader(sampling="epoch", sampler=weighted) for _ in range(2))
    one = first.batch(0, 1, Minibatch(0, 0, 0)).tolist()
    assert max(one) < 8
    assert one == again.batch(2, 9, Minibatch(0, 0, 0)).tolist()
    assert one != first.batch(0, 1, Minibatch(0, 1, 0)).tolist()


class DrawingRange(list):
    """Numbers of the samples; when they are counted, the global generator is used, as another thread may do."""

    def __len__(self):
        torch.rand(1)
        return super().__len__()


@pytest.mark.parametrize("generator", [None, torch.Generator()])
@pytest.mark.parametrize(
    "make",
    [
        lambda numbers, generator: RandomSampler(numbers, generator=generator),
        lambda numbers, generator: RandomSampler(numbers, replacement=True, generator=generator),
        lambda numbers, generator: RandomSampler(numbers, num_samples=2 * SAMPLES + BATCH, generator=generator),
        SubsetRandomSampler,
        lambda numbers, generator: SequentialSampler(numbers),
    ],
)
def test_a_sampler_of_torch_and_other_threads_do_not_disturb_each_other(make, generator):
    numbers = range(SAMPLES), DrawingRange(range(SAMPLES))
    alone, disturbed = (loader(sampling="epoch", sampler=make(each, generator)) for each in numbers)
    expected = alone.indices(0, 1, Minibatch(0, 0, 0)).tolist()
    torch.manual_seed(0)
    assert disturbed.indices(0, 1, Minibatch(0, 0, 0)).tolist() == expected
    drawn_next = torch.rand(1)
    torch.manual_seed(0)
    assert drawn_next != torch.rand(1)  # what was drawn meanwhile is not drawn again


def test_a_data_set_may_make_batches_itself():
    indices = loader(data=Batched()).batch(0, 1, None)
    assert torch.equal(indices, loader(data=Numbers()).batch(0, 1, None))


def test_a_collate_function_takes_precedence():
    job = counting_job(data=Batched(), collate=sorted)
    assert fetch(job, torch.tensor([3, 1, 2]).numpy()) == [1.0, 2.0, 3.0]


class Stream(IterableDataset):
    def __init__(self, size=40, shuffled=False):
        self.size = size
        self.shuffled = shuffled

    def __iter__(self):
        order = torch.randperm(self.size) if self.shuffled else torch.arange(self.size)
        return iter(order.float())


@pytest.mark.parametrize("shuffled", [False, True])
def test_iterable_data_are_split_among_workers_and_positioned_by_draw(shuffled):
    data = Stream(48, shuffled)
    workers = [loader(data=data) for _ in range(3)]
    seen = [
        sample
        for worker in range(3)
        for draw in (1, 2)
        for sample in workers[worker].batch(worker, draw, None).tolist()
    ]
    assert sorted(seen) == list(range(48))
    skipping = loader(data=data)
    assert skipping.batch(1, 2, None).tolist() == seen[24:32]


def test_iterable_data_train_on_both_engines():
    job = counting_job(data=Stream(SAMPLES))
    for cluster in (pl.Cluster(2), pl.LocalCluster(2)):
        result = pl.train(job, protocol=pl.bsp(), cluster=cluster, stop=pl.Stop(updates=6), seed=2)
        assert result.model.seen.detach().tolist() == [0.5] * SAMPLES  # means of two gradients


def test_epochs_of_iterable_data_are_refused():
    with pytest.raises(pl.UsageError, match="these data have no length"):
        pl.train(counting_job(data=Stream()), protocol="bsp", cluster=pl.Cluster(2), stop=pl.Stop(epochs=1))
    with pytest.raises(pl.UsageError, match="iterable data have no numbered samples"):
        counting_job(data=Stream(), sampling="epoch")


def test_an_empty_stream_is_an_error():
    with pytest.raises(pl.RunError, match="gave no sample"):
        pl.train(counting_job(data=Stream(0)), protocol="bsp", cluster=pl.Cluster(2), stop=pl.Stop(updates=1))


def test_evaluation_reads_the_data_once():
    job = counting_job(eval_data=Numbers(20))
    assert [len(batch) for batch in eval_batches(job)] == [8, 8, 4]
    assert torch.cat(list(eval_batches(job))).tolist() == list(range(20))
    streamed = counting_job(eval_data=Stream(20))
    assert torch.cat(list(eval_batches(streamed))).tolist() == list(range(20))


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Dropout(), nn.Linear(8, 3)).double()

    def forward(self, x):
        return self.layers(x)


def test_dropout_depends_on_the_draw_and_not_on_timing():
    fast = pl.Cluster(2, timing=pl.timing.Deterministic(1.0))
    slow = pl.Cluster(2, timing=[pl.timing.Deterministic(1.0), pl.timing.Deterministic(7.0)])
    job = tiny_job(model=Dropping)
    runs = [pl.train(job, protocol=pl.bsp(), cluster=cluster, stop=pl.Stop(updates=8)) for cluster in (fast, slow)]
    ours, theirs = (list(run.model.parameters()) for run in runs)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(ours, theirs, strict=True))


def test_global_random_generators_are_unchanged():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    pl.train(tiny_job(model=Dropping), protocol="bsp", cluster=pl.Cluster(2), stop=pl.Stop(updates=2))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("sampling", ["replacement", "epoch"])
def test_slices_are_ranges_of_the_minibatches_that_they_name(sampling):
    loader = MinibatchLoader(tiny_job(sampling=sampling), seed=3, n=3)
    numbers = [(0, 1), (0, 5)] if sampling == "epoch" else [(None, None)] * 2
    whole = [loader.indices(worker, 4, Minibatch(0, *number)) for worker, number in zip((0, 2), numbers, strict=True)]
    (first_epoch, first), (second_epoch, second) = numbers
    slices = (
        MinibatchSlice(worker=0, draw=4, epoch=first_epoch, number=first, begin=0, end=BATCH),
        MinibatchSlice(worker=2, draw=4, epoch=second_epoch, number=second, begin=5, end=7),
    )
    found = loader.indices(0, 4, Minibatch(0, first_epoch, first, slices=slices, share=10 / BATCH))
    assert found.tolist() == [*whole[0], *whole[1][5:7]]
