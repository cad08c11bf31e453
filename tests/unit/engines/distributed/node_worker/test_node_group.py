"""Shares of a minibatch, and the process group of a node."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import IterableDataset

import paceline as pl
from paceline.core.events import Minibatch
from paceline.engines.distributed.node_worker.node_group import NodeGroup, NodeGroupLost
from paceline.engines.distributed.transport.transport import Transport
from paceline.server.parameter_server import ParameterServer
from paceline.worker.gradient_source import Interrupted, PartialGradient
from paceline.worker.gradient_variance import variance
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model
from selections import parametrize_few
from sum_groups import stores, transport
from tiny_jobs import batch_norm_net, dataset, tiny_job

EXACT = 1e-12
NODE = {"workers": "node"}


# --- shares -----------------------------------------------------------------------------------------------


class Alone:
    """A process of a team whose others are never there: it keeps what it would have given them."""

    def __init__(self, place, size):
        self.local_rank, self.size = place, size
        self.checks = 0

    def begin(self, draw, minibatch, version):
        pass

    def check(self):
        self.checks += 1

    def whole_norm(self, norm):
        return norm

    def all_reduce(self, gradient, part):
        self.gradient = [flat.clone() for flat in (*gradient.flat_parameters, *gradient.flat_buffers)]
        self.part = part
        return part


def gradient_of(job, team=None, draw=1, minibatch=None):
    """Return the gradient of worker 1 of 2 at the first version, and what is measured of it."""
    replica = Replica(job, 3, 2, group=team)
    version, gradient = replica.layout.allocate(), replica.layout.allocate()
    ParameterServer(job, build_model(job, 3), replica.layout, None).publish(version)
    measured = replica.gradient(1, draw, minibatch, version, gradient)
    return gradient, measured


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(dataset())


def same(ours, theirs):
    return torch.allclose(ours, theirs, rtol=EXACT, atol=1e-14)


@pytest.mark.parametrize("microbatches", [1, 3])
@parametrize_few("size", [2, 3, 5, 9], keep=1)
@pytest.mark.parametrize(
    ("job", "minibatch"),
    [
        (tiny_job(batch_size=8), None),
        (tiny_job(batch_size=7, sampling="epoch"), Minibatch(0, 0, 13)),  # of 96 samples: 5 are left
        (tiny_job(batch_size=8, data=Numbers()), None),
    ],
    ids=["drawn", "last", "iterable"],
)
def test_shares_add_up_to_the_minibatch(job, minibatch, size, microbatches):
    job = pl.Job(**{**vars(job), "microbatches": microbatches})
    whole, measured = gradient_of(job, minibatch=minibatch)
    teams = [Alone(place, size) for place in range(size)]
    for team in teams:
        gradient_of(job, team, minibatch=minibatch)
    samples = [team.part.samples for team in teams]
    assert sum(samples) == measured.samples
    assert max(samples) - min(samples) <= 1
    assert {team.checks for team in teams} == {microbatches}
    for i, expected in enumerate(whole.flat_parameters):
        given = [team.part.samples * team.gradient[i] for team in teams if team.part.samples]
        assert same(sum(given) / measured.samples, expected)
    losses = [team.part.samples * team.part.loss for team in teams]
    assert sum(losses) / measured.samples == pytest.approx(measured.loss, rel=EXACT)


def test_the_variance_is_that_of_all_microbatches():
    teams = [Alone(place, 2) for place in range(2)]
    for team in teams:
        gradient_of(tiny_job(microbatches=2), team)
    mean_square = sum(team.part.mean_square * team.part.samples for team in teams) / 8
    _, measured = gradient_of(tiny_job(microbatches=4))
    parts = sum(team.part.microbatches for team in teams)
    assert variance(mean_square, measured.squared_norm, parts) == pytest.approx(measured.variance, rel=1e-9)


def test_each_process_drops_out_by_itself():
    job = tiny_job(model=lambda: nn.Sequential(nn.Linear(5, 64), nn.Dropout(), nn.Linear(64, 3)).double())
    job = pl.Job(
        **{**vars(job), "data": torch.utils.data.TensorDataset(torch.ones(96, 5).double(), torch.ones(96).long())}
    )
    teams = [Alone(place, 2) for place in (0, 1, 0)]
    for team in teams:
        gradient_of(job, team)
    assert torch.equal(teams[0].gradient[0], teams[2].gradient[0])
    assert not torch.equal(teams[0].gradient[0], teams[1].gradient[0])


# --- a process group --------------------------------------------------------------------------------------


def together(size, act, unwanted=()):
    """Return what each of a team does, in threads of this process."""
    connecting, of_team = transport(), stores(size)

    def take_part(place):
        team = NodeGroup(place, size, lambda: place in unwanted)
        team.connect(connecting, of_team[place], "a key")
        return act(team)

    with closing(connecting), ThreadPoolExecutor(size) as pool:
        return list(pool.map(take_part, range(size)))


def test_the_sum_weighs_by_the_weights_of_loops_and_is_skipped_as_a_whole():
    layout = Replica(tiny_job(), 3, 2).layout

    def act(team):
        rank = team.local_rank
        mine = layout.allocate()
        mine.flat_parameters[0].fill_(1.0 + rank)
        part = PartialGradient(
            loss=1.0, samples=4, weight=1.0 + 2 * rank, skipped=rank == 1, learning_rates=(0.1 + rank,)
        )
        return mine, team.all_reduce(mine, part)

    done = together(2, act)
    for rank, (mine, part) in enumerate(done):
        assert mine.flat_parameters[0][0] == (1.0 * 1 + 2.0 * 3) / 4
        assert (part.samples, part.weight, part.skipped, part.overflowed) == (8, 4.0, True, False)
        assert part.learning_rates == (0.1 + rank,)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=4).filter(any), st.integers(1, 3))
def test_the_sum_weighs_by_samples(samples, microbatches):
    job = tiny_job(model=batch_norm_net)
    layout = Replica(job, 3, 2).layout
    values = torch.randn(len(samples), layout.nbytes // 8, dtype=torch.float64)

    def act(team):
        rank = team.local_rank
        mine = layout.allocate()
        for each in (*mine.flat_parameters, *mine.flat_buffers):
            each.copy_(
                values[team.local_rank][: len(each)]
                if each.is_floating_point()
                else torch.tensor([team.local_rank + 1])
            )
        count = samples[rank]
        mine.written = set(range(len(mine.parameters))) if count else set()
        if not count:
            mine.flat_parameters[0].fill_(float("nan"))  # of a process that has nothing to do
        return mine, team.all_reduce(
            mine,
            PartialGradient(
                loss=2.0 * team.local_rank, samples=count, mean_square=3.0 * team.local_rank, microbatches=microbatches
            ),
        )

    done = together(len(samples), act)
    total = sum(samples)
    expected = sum(count * value for count, value in zip(samples, values, strict=True)) / total
    mean_place = sum(place * count for place, count in enumerate(samples)) / total
    for mine, part in done:
        assert same(mine.flat_parameters[0], expected[: len(mine.flat_parameters[0])])
        assert len(mine.written) == len(mine.parameters)
        assert part[:4] == pytest.approx(
            (2 * mean_place, total, 3 * mean_place, microbatches * len(samples)), rel=EXACT
        )
    first = done[0][0]
    [counted] = [each for each in first.flat_buffers if not each.is_floating_point()]
    [averaged] = [each for each in first.flat_buffers if each.is_floating_point()]
    assert counted.tolist() == [1]
    assert same(averaged, expected[: len(averaged)])


def outcome(act):
    """Return what is raised."""
    try:
        act()
    except (Interrupted, NodeGroupLost) as raised:
        return type(raised)
    return None


@pytest.mark.parametrize("unwanted", [(), (0,), (2,)])
def test_all_processes_abandon_a_task_or_none(unwanted):
    def act(team):
        gradient = Replica(tiny_job(), 3, 2).layout.allocate()
        return outcome(team.check), outcome(
            lambda: team.all_reduce(gradient, PartialGradient(loss=1.0, samples=4, mean_square=0.0, microbatches=0))
        )

    expected = Interrupted if unwanted else None
    assert together(3, act, unwanted) == [(expected, expected)] * 3


def test_a_version_reaches_every_process():
    layout = Replica(tiny_job(), 3, 2).layout

    def act(team):
        version = layout.allocate()
        version.memory.fill_(7 + team.local_rank)
        team.broadcast(version)
        return int(version.memory.min())

    assert together(3, act) == [7, 7, 7]


@pytest.mark.slow
def test_a_slow_process_is_awaited():
    def act(team):
        time.sleep(2.0 * team.local_rank)  # longer than to connect
        return outcome(team.check)

    def connecting(*what, **settings):
        return connect(*what, **{**settings, "timeout_s": 1.0})

    connect = Transport.group
    with patch.object(Transport, "group", connecting):
        assert together(2, act) == [None, None]


def test_a_wait_for_a_group_that_is_lost_raises():
    def act(team):
        if team.local_rank == 1:
            time.sleep(0.1)  # the others wait for this one
            team.abort()
        return outcome(team.check)

    begun_s = time.monotonic()
    assert together(3, act) == [NodeGroupLost] * 3
    assert time.monotonic() - begun_s < 5.0


def test_a_process_that_finds_the_sockets_of_the_group_but_does_not_have_its_key_is_refused():
    connecting, of_team = transport(), stores(2)
    key = {0: "a key", 1: "a guess"}

    def take_part(place):
        return outcome(lambda: NodeGroup(place, 2, lambda: False).connect(connecting, of_team[place], key[place]))

    with closing(connecting), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(take_part, range(2))) == [NodeGroupLost] * 2
