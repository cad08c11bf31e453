"""Sums that begin while gradients are computed: used where all count, and made anew where they do not."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from early_uses import make_small, note_uses
from paceline.core.records import WorkerJoined
from paceline.engines.distributed.announced_sums.early_sum import EarlySum
from rank_threads import ranks, run
from ranks import flat, lost
from selections import parametrize_few
from tiny_counting import BATCH, Counter, counting_job, times_applied
from tiny_jobs import batch_norm_net, largest_relative_difference, tiny_job
from tiny_tokens import Model, mean_over_tokens, sequences, tokens_of

EXACT = 1e-12
SUMS = {"server": False}


@pytest.fixture
def small_buckets(monkeypatch):
    make_small(monkeypatch)


@pytest.fixture
def used(monkeypatch):
    return note_uses(monkeypatch)


def simulated(job, n, **settings):
    return flat(pl.train(job, cluster=pl.Cluster(n), seed=1, **settings).model.state_dict())


@parametrize_few("job", [{}, {"model": batch_norm_net}, {"microbatches": 2, "clip_norm": 0.1}], keep=2)
@pytest.mark.usefixtures("small_buckets")
def test_the_sums_of_bsp_begin_in_the_backward_pass(job, used):
    job, settings = tiny_job(**job), {"protocol": "bsp", "stop": "updates=15"}
    ends = run(3, job, SUMS, **settings)
    assert len(used) == 3 * 15
    assert set(used) == {len(list(job.model().parameters()))}, "each bucket begins before the end of the gradient"
    assert len({tuple(flat(end.parameters).tolist()) for end in ends}) == 1, "all ranks have the same bits"
    assert largest_relative_difference(flat(ends[0].parameters), simulated(job, 3, **settings)) < EXACT


TOKENS = {"model": Model, "loss": None, "step": mean_over_tokens, "data": sequences(48), "weight": tokens_of}


@parametrize_few(
    ("job", "protocol"), [(TOKENS, "bsp"), ({}, "k_sync(k=2)"), ({}, "balanced(m=4)"), ({}, "dbw")], keep=1
)
def test_sums_of_other_weights_or_of_some_gradients_are_made_when_they_are_announced(job, protocol, used):
    ends = run(3, tiny_job(**job), SUMS, protocol=protocol, stop="updates=12")
    assert used == []
    assert len({tuple(flat(end.parameters).tolist()) for end in ends}) == 1


class Two(Counter):
    """Counter with a second parameter, which changes nothing."""

    def __init__(self, samples):
        super().__init__(samples)
        self.other = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, index):
        return super().forward(index) + 1e-30 * self.other.sum()


@pytest.mark.usefixtures("small_buckets")
def test_a_rank_that_is_lost_within_a_backward_pass_costs_no_sample(monkeypatch, used):
    samples, epochs, fired, begin_next = 24 * BATCH, 4, [], EarlySum._begin_next
    job = replace(counting_job(samples), model=partial(Two, samples))

    def killing(early):
        if not fired and early._next == 1 and len(used) >= 8 and early._group.rank == 2:
            fired.append(len(used))
            made.processes[2].kill()
        begin_next(early)

    monkeypatch.setattr(EarlySum, "_begin_next", killing)
    with ranks(3, job, SUMS, protocol="bsp", stop=f"epochs={epochs}") as made:
        made.start_workers()
        end = made.serve()
        ends = [end, made.end(1)]
    assert fired
    assert [worker for worker, _ in lost(end)] == [2]
    assert len(used) > fired[0] + 10, "sums begin early in the next group, too"
    model = job.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples
    assert len({tuple(flat(each.parameters).tolist()) for each in ends}) == 1, "all ranks have the same bits"


def test_a_rank_that_joins_takes_part_in_early_sums(used):
    faults = {"faults": [pl.Fault(worker=1, draw=4, kind="die")]}
    slow = pl.Cluster(3, timing=pl.timing.Deterministic(0.02))
    with ranks(3, tiny_job(), SUMS | faults | {"slowness": slow}, protocol="bsp", stop="updates=40") as made:
        made.start_workers()
        made.when_ended(1, lambda: made.start(1, torchrun={"faults": []}))
        end = made.serve()
        ends = [end, made.end(1), made.end(2)]
    assert [each.worker for each in end.of(WorkerJoined)] == [1]
    assert len(used) > 2 * 25
    assert len({tuple(flat(each.parameters).tolist()) for each in ends}) == 1, "all ranks have the same bits"
