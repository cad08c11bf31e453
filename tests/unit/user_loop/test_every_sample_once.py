"""Whole epochs of attached loops: every sample is applied once, whatever is dropped, dies and comes back."""

import threading
from collections import Counter
from functools import partial
from random import Random

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads, Killed
from machine_speed import scaled
from paceline.core.records import WorkerJoined, WorkerLost
from selections import each_value_once, parametrize_few

SAMPLES, BATCH, EPOCHS, RANKS = 50, 4, 3, 4
SEEDS = range(20)
FREE_STEPS = 5  # of a rank before the deaths


class Counts(nn.Module):
    """Parameter whose gradient is the number of times that each sample is in the batch."""

    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))


def make_parts(**loader):
    model = Counts()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, DataLoader(range(SAMPLES), **(loader or {"batch_size": BATCH, "shuffle": True}))


class Faults:
    """Deaths of two ranks, of which the second starts again.

    Args:
        seed: seed of the ranks and of their steps.
    """

    def __init__(self, seed):
        random = Random(seed)
        first, second = random.sample(range(1, RANKS), 2)
        self.deaths = {first: random.randint(1, FREE_STEPS - 1), second: random.randint(1, FREE_STEPS - 1)}
        self.restarted = second
        self.fired = []
        self.rejoined = threading.Event()

    def before_step(self, ranks, rank, step):
        """Kill a rank at its step, and let the others wait for the deaths and for the return."""
        if self.deaths.get(rank) == step and rank not in self.fired:
            self.fired.append(rank)
            ranks.kill(rank, is_restarted=rank == self.restarted)
        if rank in self.fired:
            self.rejoined.set()
        elif step == FREE_STEPS:
            assert self.rejoined.wait(scaled(10.0))


def train(ranks, faults):
    def loop(run, model, optimizer):
        rank = next(rank for rank, parts in enumerate(ranks.parts) if parts[0] is model)
        step = 0
        for _ in run.epochs(EPOCHS):
            for numbers in run.loader:
                step += 1
                (-model.counts[numbers].sum()).backward()
                faults.before_step(ranks, rank, step)
                optimizer.step()
        return step

    return loop


@pytest.mark.parametrize("server", [True, False])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])])
def test_with_drops_two_deaths_and_a_return_every_sample_is_applied_once_an_epoch(seed, server):
    faults = Faults(seed)
    ranks = AttachedThreads(RANKS, make_parts, "k_sync(k=1)", server=server)
    answers = ranks.run(train(ranks, faults))
    assert sorted(faults.fired) == sorted(faults.deaths)
    [dead] = [rank for rank, answer in enumerate(answers) if isinstance(answer, Killed)]
    assert dead != faults.restarted
    history = ranks.server.result.history
    assert [each.worker for each in history.of(WorkerJoined)] == [faults.restarted]
    assert {each.worker for each in history.of(WorkerLost)} == set(faults.deaths)
    assert history.totals.dropped + history.totals.interrupted > 0
    for rank in {*range(RANKS)} - {dead}:
        assert ranks.parts[rank][0].counts.tolist() == [EPOCHS] * SAMPLES


DRAWN = 20
SAMPLERS = {
    "with replacement": RandomSampler(range(SAMPLES), replacement=True, num_samples=DRAWN),
    "some": RandomSampler(range(SAMPLES), num_samples=DRAWN),
    "more than there are": RandomSampler(range(SAMPLES), num_samples=SAMPLES + DRAWN),
    "of a part": RandomSampler(range(DRAWN)),
    "the first": SequentialSampler(range(DRAWN)),
}


@parametrize_few(
    ("name", "way", "as_batches"),
    each_value_once(list(SAMPLERS), [("bsp", AttachedThreads), ("all_reduce", AllReduceLoops)], [False, True]),
    keep=1,
)
def test_an_epoch_has_the_samples_of_its_sampler(name, way, as_batches):
    protocol, kind = way

    def loop(run, model, optimizer):
        used = []
        for _ in run.epochs(2):
            for numbers in run.loader:
                (-model.counts[numbers].sum()).backward()
                optimizer.step()
                used += numbers.tolist()
        return used

    sampler = SAMPLERS[name]
    loader = {"batch_size": BATCH, "sampler": sampler}
    if as_batches:
        loader = {"batch_sampler": BatchSampler(sampler, BATCH, drop_last=False)}
    first, second = kind(2, partial(make_parts, **loader), protocol).run(loop)
    times = Counter([*first, *second])
    assert times.total() == 2 * len(sampler)
    if name == "some":
        assert max(times.values()) <= 2
    if name == "more than there are":
        assert set(times.values()) <= {2, 3, 4}
    if name in ("of a part", "the first"):
        assert times == dict.fromkeys(range(DRAWN), 2)
