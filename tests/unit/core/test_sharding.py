"""Servers of shards against one server of the whole, the same gradients for both."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations, pairwise
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import StepLR

import paceline as pl
from machine_speed import scaled
from odd_parts import OPTIMIZERS, Odd
from paceline.catalogue.modifiers import dc_asgd, staleness_lr, staleness_weight
from paceline.core.events import Accept, Apply, Step
from paceline.core.sharding import NoPeers, merge_shards, shard_boundaries
from paceline.jobs.job import trainable
from paceline.policies.compensation.delay import DCS3GD
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.worker.torch_utils import build_model
from selections import parametrize_few
from tiny_jobs import batch_norm_net, small_net, tiny_job

ROUNDING = 1e-11  # of float64, through a few updates: a sum is that of its shards, and vector units round otherwise
MODELS = [small_net, batch_norm_net, Odd]


# --- where it is cut -------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8), data=st.data())
def test_the_largest_shard_has_the_minimum_size(sizes, data):
    shards = data.draw(st.integers(1, len(sizes)))

    def largest(cut):
        return max(sum(sizes[start:end]) for start, end in pairwise(cut))

    cut = shard_boundaries(sizes, shards)
    assert cut == sorted(set(cut))
    assert (cut[0], cut[-1], len(cut)) == (0, len(sizes), shards + 1)
    every = ([0, *between, len(sizes)] for between in combinations(range(1, len(sizes)), shards - 1))
    assert largest(cut) == min(map(largest, every))


def test_more_shards_than_tensors_are_refused():
    with pytest.raises(pl.UsageError, match="shards=5, but the model has 4 tensors to share out: give at most that"):
        FlatLayout(small_net(), shards=5)


@pytest.mark.parametrize("shards", [1, 2, 3, 6])
@pytest.mark.parametrize("model", [batch_norm_net, Odd])
def test_a_shard_alone_equals_its_part_of_the_full_vector(model, shards):
    made = model()
    whole = FlatLayout(made, shards)
    vectors = whole.allocate()
    for number, view in enumerate([*vectors.parameters, *vectors.buffers], start=1):
        view.fill_(number)
    parameters, buffers = [], []
    for place, layout in zip(
        whole.shard_ranges, (FlatLayout(made, shards, only) for only in range(shards)), strict=True
    ):
        part = FlatBuffers(layout, vectors.memory[place])
        parameters += part.parameters
        buffers += part.buffers
    assert [each.shape for each in parameters] == [each.shape for each in trainable(made)]
    for ours, theirs in zip([*parameters, *buffers], [*vectors.parameters, *vectors.buffers], strict=True):
        assert ours.data_ptr() == theirs.data_ptr()
        assert torch.equal(ours, theirs)


# --- several servers in this process ---------------------------------------------------------------------------------


class Neighbour(NoPeers):
    """The others as threads of this process."""

    def __init__(self, number, barrier, shares):
        self.number, self.barrier, self.shares = number, barrier, shares
        self.servers = []

    def summed(self, shares):
        self.shares[self.number] = shares
        self.barrier.wait(scaled(2))
        totals = [sum(each) for each in zip(*self.shares, strict=True)]
        self.barrier.wait(scaled(2))
        return totals


class Together:
    """The servers of all shards, which do everything at the same time."""

    def __init__(self, job, shards, seed=0):
        self.whole = FlatLayout(build_model(job, seed), shards)
        barrier, shares = threading.Barrier(shards), [None] * shards
        self.servers = []
        for number in range(shards):
            model = build_model(job, seed)
            layout = FlatLayout(model, shards, only=number)
            neighbour = Neighbour(number, barrier, shares)
            self.servers.append(ParameterServer(job, model, layout, 10, neighbour))
        self.layouts = [FlatLayout(build_model(job, seed), shards, only) for only in range(shards)]

    def part(self, vectors, number):
        return FlatBuffers(self.layouts[number], vectors.memory[self.whole.shard_ranges[number]].clone())

    def all(self, action):
        """Let every server do something at once, and return the answers."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            return list(pool.map(lambda number: action(self.servers[number], number), range(len(self.servers))))

    def tensors(self):
        """Return all parameters and buffers, each from the server that owns it."""
        states = [server.shard_state()["model"] for server in self.servers]
        return {name: tensor for state in states for name, tensor in state.items()}


def fill(vectors, seed, scale=1.0):
    drawn = torch.Generator().manual_seed(seed)
    for view in vectors.parameters:
        view.copy_(torch.randn(view.shape, generator=drawn, dtype=torch.float64) * scale)
    for view in vectors.buffers:
        view.copy_(torch.randint(0, 2, view.shape, generator=drawn))
    return vectors


gradients = st.fixed_dictionaries(
    {"samples": st.integers(1, 9), "step_scale": st.sampled_from([1.0, 0.5]), "staleness": st.integers(0, 2)}
)
updates = st.fixed_dictionaries(
    {
        "gradients": st.lists(gradients, min_size=1, max_size=3),
        "lr_scale": st.sampled_from([1.0, 0.3]),
        "measure": st.booleans(),
        "momentum_limit": st.sampled_from([inf, 0.5, 0.0]),
        "weight_decay_scale": st.sampled_from([1.0, 0.0, 20.0]),
        "adds_at_once": st.booleans(),
    }
)


def train(together, plan, compensators, first_seed=0):
    """Make updates as an engine would and return what the server of each shard has answered."""
    seed, answers = first_seed, []
    for version, update in enumerate(plan, start=1):
        accepted = []
        for each in update["gradients"]:
            seed += 1
            gradient = fill(together.whole.allocate(), seed)
            then = fill(together.whole.allocate(), seed + 1000, scale=0.1)
            squared_norm = sum(float((view.double() ** 2).sum()) for view in gradient.parameters)
            accepted.append(
                Accept(
                    worker=0,
                    draw=seed,
                    staleness=each["staleness"],
                    samples=each["samples"],
                    step_scale=each["step_scale"],
                )
            )

            def take(server, number, each=each, gradient=gradient, then=then, squared_norm=squared_norm):
                ours = together.part(gradient, number)
                at = together.part(then, number)
                done = server.compensate(compensators, ours, at, each["staleness"], squared_norm)
                server.enqueue(ours, each["samples"], each["step_scale"])
                return done

            answers.append(together.all(take))
            if update["adds_at_once"]:
                together.all(lambda server, number: server.accumulate())
        step_scale = sum(one.step_scale * one.samples for one in accepted) / sum(one.samples for one in accepted)
        told = {name: update[name] for name in ("lr_scale", "measure", "momentum_limit", "weight_decay_scale")}
        command = Apply(version, tuple(accepted), reason="", step_scale=step_scale, **told)
        answers.append(together.all(lambda server, number, command=command: server.apply(command)))
    return answers


def close(ours, theirs, relative):
    return all(
        torch.allclose(ours[name].double(), theirs[name].double(), rtol=relative, atol=relative) for name in theirs
    )


def rounding(model):
    return 1e-4 if model is Odd else ROUNDING  # it has single precision


def make_job(model, optimizer, clip_norm=None, scheduled=False, no_decay_on=()):
    schedule = partial(StepLR, step_size=2, gamma=0.5) if scheduled else None
    optimizer = OPTIMIZERS[optimizer]
    return tiny_job(model=model, optimizer=optimizer, clip_norm=clip_norm, scheduler=schedule, no_decay_on=no_decay_on)


def numbers(told):
    """Return those of a step, or of what compensators have done."""
    if told is None or isinstance(told, Step):
        return list(told or ())
    done, finite = told
    return [*(each.factor for each in done), float(finite)]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    clip_norm=st.sampled_from([None, 0.5, 100.0]),
    compensators=st.sampled_from(
        [
            (),
            (staleness_weight(), dc_asgd(lambda0=0.5, m=0.9)),
            (staleness_lr(C=0.3), DCS3GD()),
            (DCS3GD(), staleness_lr(C=0.3)),
        ]
    ),
    scheduled=st.booleans(),
    no_decay_on=st.sampled_from([(), pl.jobs.BATCH_NORMS, (nn.Linear,)]),
    plan=st.lists(updates, min_size=1, max_size=4),
    shards=st.integers(2, 4),
)
def test_all_shards_together_equal_one_server(
    model, optimizer, clip_norm, compensators, scheduled, no_decay_on, plan, shards
):
    job = make_job(model, optimizer, clip_norm, scheduled, no_decay_on)
    one, many = Together(job, 1), Together(job, shards)
    answers = zip(train(one, plan, compensators), train(many, plan, compensators), strict=True)
    for [expected], told in answers:
        assert all(each == told[0] for each in told)
        assert numbers(told[0]) == pytest.approx(numbers(expected), rel=rounding(model), abs=1e-12)
    assert close(many.tensors(), one.tensors(), rounding(model))
    assert {server.learning_rate for server in many.servers} == {one.servers[0].learning_rate}


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    before=st.lists(updates, min_size=1, max_size=2),
    after=st.lists(updates, min_size=1, max_size=2),
    shards=st.integers(1, 4),
    then=st.integers(1, 4),
)
def test_a_run_is_resumed_with_another_number_of_shards(optimizer, before, after, shards, then):
    job = make_job(Odd, optimizer, scheduled=True)
    compensators = (dc_asgd(lambda0=0.5, m=0.9),)
    unbroken, first, second = Together(job, 1), Together(job, shards), Together(job, then, seed=1)
    for together in (unbroken, first):
        train(together, before, compensators)
        together.all(open_an_update(together))
    saved = merge_shards([server.shard_state() for server in first.servers])
    assert close(saved["model"], unbroken.tensors(), rounding(Odd))
    parameters = first.servers[0].model.named_parameters()
    frozen = {name: tensor.detach() for name, tensor in parameters if not tensor.requires_grad}  # no server owns these
    saved = {**saved, "model": {**saved["model"], **frozen}}
    for server in second.servers:
        server.load_state_dict(saved)
    for together in (unbroken, second):
        train(together, after, compensators, first_seed=500)
    assert close(second.tensors(), unbroken.tensors(), rounding(Odd))


def open_an_update(together):
    """Return what takes two gradients, of which no update is made yet."""
    given = [fill(together.whole.allocate(), seed) for seed in (77, 78)]

    def take(server, number):
        for gradient in given:
            server.enqueue(together.part(gradient, number), 3)

    return take


def of_model(model):
    return torch.optim.AdamW([{"params": model.parameters(), "lr": 0.05}], lr=0.1, weight_decay=0.1)


def of_named_parameters(named_parameters):
    return torch.optim.AdamW(named_parameters, lr=0.05, weight_decay=0.1)


def of_parameters(parameters):
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


@parametrize_few("factory", [of_model, of_named_parameters], keep=1)
def test_shards_have_the_optimizer_of_the_whole_model(factory):
    gradient = {"samples": 8, "step_scale": 1.0, "staleness": 0}
    update = {"gradients": [gradient] * 2, "lr_scale": 1.0, "measure": False, "adds_at_once": False}
    plan = [{**update, "momentum_limit": inf, "weight_decay_scale": 1.0}] * 3
    tensors = []
    for shards, makes in [(1, of_parameters), (1, factory), (3, factory)]:
        job = tiny_job(model=batch_norm_net, optimizer=makes, no_decay_on=pl.jobs.BATCH_NORMS)
        together = Together(job, shards)
        train(together, plan, ())
        tensors.append(together.tensors())
    for theirs in tensors[1:]:
        assert all(torch.equal(tensors[0][name], theirs[name]) for name in tensors[0])
