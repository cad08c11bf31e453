"""Parameters of ranks that sum their gradients by hand: the mean of a server, whatever each rank holds."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.core.events import Accept, Apply
from paceline.engines.distributed.announced_sums.rank_parameters import RankParameters
from paceline.engines.distributed.transport.announced_messages import SummedGradient
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout, is_a_mean
from tiny_jobs import tiny_job

EXACT = 1e-12


class Counted(nn.Module):
    """Model with a frozen scale, a running mean and whole numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("position", torch.tensor(0))
        self.register_buffer("is_odd", torch.tensor(False))


def server():
    model = Counted()
    job = tiny_job(model=Counted)
    return ParameterServer(job, model, FlatLayout(model), per_epoch=None), FlatLayout(model)


def fill(gradient, numbers):
    """Write a gradient with changes of the buffers."""
    for each in [*gradient.flat_parameters, *gradient.flat_buffers]:
        if is_a_mean(each):
            each.copy_(torch.randn(each.shape, generator=numbers, dtype=each.dtype))
        else:
            each.copy_(torch.randint(0, 2, each.shape, generator=numbers))
    gradient.written = {0, 1}


def summed(parts):
    """Let all ranks have the sum of their terms, as a group does it."""
    for flats in zip(*(part.total.flat_parameters + part.total.flat_buffers for part in parts), strict=True):
        total = flats[0].clone()
        for flat in flats[1:]:
            total = total | flat if total.dtype == torch.bool else total + flat
        for flat in flats:
            flat.copy_(total)


updates = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans()), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(updates, st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_each_rank_has_the_parameters_of_a_server(script, reads, keeps_memory, seed):
    numbers = torch.Generator().manual_seed(seed)
    whole, layout = server()
    ranks = [RankParameters(server()[0], layout, worker, keeps_memory=keeps_memory) for worker in range(3)]
    draws, keeps = [0, 0, 0], [False] * 3
    for version, update in enumerate(script, start=1):
        accepted = []
        for worker, samples, is_used in update:
            rank = ranks[worker]
            rank.begin_task(keeps_for=version if keeps[worker] else None)
            draws[worker] += 1
            assert rank.gradient.memory.untyped_storage().nbytes() == keeps_memory * layout.nbytes
            rank.gradient.claim()
            fill(rank.gradient, numbers)
            rank.end_task(draws[worker], samples)
            keeps[worker] = is_used
            if is_used:
                accepted.append(SummedGradient(worker, draws[worker], samples, at=worker))
                copy = layout.allocate()
                copy.copy_(rank.gradient)
                whole.enqueue(copy, samples, worker=worker)
        if not accepted:
            continue
        gradients = tuple(Accept(worker=w, draw=d, staleness=0, samples=s) for w, d, s, _ in accepted)
        command = Apply(version=version, gradients=gradients, lr_scale=1.0, reason="")
        kept = [version if each else None for each in keeps]
        read = [rank.begin_task(keeps_for=kept[worker]) for worker, rank in enumerate(ranks)] if reads else []
        before = [each.memory.clone() for each in read]
        for rank in ranks:
            rank.write_terms(version, accepted)
        summed(ranks)
        for rank in ranks:
            rank.add_sum(version, accepted, missing=())
            rank.apply(command)
        keeps = [False] * 3
        whole.apply(command)
        assert all(torch.equal(each.memory, old) for each, old in zip(read, before, strict=True)), "is still read"
        for rank in ranks:
            rank.cancel_task()
            ours = rank.begin_task(keeps_for=None)
            for mine, theirs in zip(
                ours.flat_parameters + ours.flat_buffers,
                whole.state.flat_parameters + whole.state.flat_buffers,
                strict=True,
            ):
                assert torch.allclose(mine.double(), theirs.double(), rtol=EXACT, atol=EXACT)


def test_what_is_summed_before_the_update_counts_in_it():
    whole, layout = server()
    ranks = [RankParameters(server()[0], layout, worker) for worker in range(2)]
    numbers = torch.Generator().manual_seed(1)
    gradients = []
    for draw in (1, 2):
        sums = []
        for worker, rank in enumerate(ranks):
            rank.begin_task(keeps_for=None)
            fill(rank.gradient, numbers)
            rank.end_task(draw, 3 + worker)
            sums.append(SummedGradient(worker, draw, 3 + worker, at=worker))
            copy = layout.allocate()
            copy.copy_(rank.gradient)
            whole.enqueue(copy, 3 + worker, worker=worker)
        for rank in ranks:
            rank.write_terms(draw, sums)
        summed(ranks)
        for rank in ranks:
            rank.add_sum(draw, sums, missing=())
            if draw == 1:
                rank.keep_sum()
        gradients += [Accept(worker=w, draw=d, staleness=0, samples=s) for w, d, s, _ in sums]
    command = Apply(version=1, gradients=tuple(gradients), lr_scale=1.0, reason="")
    for each in (whole, *ranks):
        each.apply(command)
    for rank in ranks:
        [weights] = rank.begin_task(keeps_for=None).flat_parameters
        assert torch.allclose(weights, whole.state.flat_parameters[0], rtol=EXACT, atol=EXACT)


def test_a_rank_that_has_lost_the_coordinator_keeps_its_version_alone():
    whole, layout = server()
    rank = RankParameters(server()[0], layout, worker=0)
    numbers = torch.Generator().manual_seed(1)

    def compute(draw):
        rank.begin_task(keeps_for=draw)
        fill(rank.gradient, numbers)
        rank.end_task(draw, 3)

    def add(draw):
        term = SummedGradient(0, draw, 3, at=0)
        rank.write_terms(draw, [term])
        rank.add_sum(draw, [term], missing=())

    compute(1)
    add(1)
    rank.keep_sum()
    compute(2)
    rank.disconnect()
    rank.begin(number=0, state=None)
    compute(3)
    add(3)
    whole.enqueue(rank.total, 3)
    accepted = (Accept(worker=0, draw=3, staleness=0, samples=3),)
    command = Apply(version=1, gradients=accepted, lr_scale=1.0, reason="")
    rank.apply(command)
    whole.apply(command)
    [weights] = rank.begin_task(keeps_for=None).flat_parameters
    assert torch.equal(weights, whole.state.flat_parameters[0])


def test_what_is_computed_for_later_sums_waits_for_them():
    numbers = torch.Generator().manual_seed(1)
    [whole, layout], rank = server(), RankParameters(server()[0], FlatLayout(Counted()), worker=0)
    terms = []
    for draw, number in enumerate([2, 1, 2], start=1):
        fill(rank.recomputed, numbers)
        rank.hold_recomputed(number, 1, draw, 3)
        copy = layout.allocate()
        copy.copy_(rank.recomputed)
        terms.append((number, SummedGradient(1, draw, 3, at=0), copy))
    for version in (1, 2):
        own = [(key, gradient) for number, key, gradient in terms if number == version]
        rank.write_terms(version, [key for key, _ in own])
        rank.add_sum(version, [key for key, _ in own], missing=())
        for key, gradient in own:
            whole.enqueue(gradient, key.weight)
        gradients = tuple(Accept(worker=1, draw=key.draw, staleness=0, samples=3) for key, _ in own)
        command = Apply(version=version, gradients=gradients, lr_scale=1.0, reason="")
        rank.apply(command)
        whole.apply(command)
        [weights] = rank.begin_task(keeps_for=None).flat_parameters
        assert torch.allclose(weights, whole.state.flat_parameters[0], rtol=EXACT, atol=EXACT)


def test_a_dropped_update_leaves_what_is_held_for_later_sums():
    rank = RankParameters(server()[0], FlatLayout(Counted()), worker=0)
    for number in (1, 2):
        fill(rank.recomputed, torch.Generator().manual_seed(1))
        rank.hold_recomputed(number, 1, number, 3)
    rank.drop_gradients(1)
    rank.write_terms(2, [SummedGradient(1, 2, 3, at=0)])
    [total], [expected] = rank.total.flat_parameters, rank.recomputed.flat_parameters
    assert torch.allclose(total, expected, rtol=EXACT, atol=EXACT)
