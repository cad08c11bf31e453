"""A worker that is all processes of a host: the same gradient as of one process, and one end for all of them."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import paceline as pl
from hosts import Cut, hosts, need_hosts, ranks_on_hosts
from paceline.core.events import Minibatch
from paceline.core.records import DecisionMade, GradientArrived, WorkInterrupted
from paceline.engines.distributed.node_worker.node_group import NodeGroup, NodeGroupLost
from paceline.engines.distributed.transport.transport import GlooTransport
from paceline.server.parameter_server import ParameterServer
from paceline.worker.gradient_variance import variance
from paceline.worker.replica import Interrupted, PartialGradient, Replica
from paceline.worker.torch_utils import build_model
from ranks import flat, lost, ranks, run, used_by
from tiny_counting import BATCH, counting_job, times_applied
from tiny_jobs import batch_norm_net, dataset, largest_relative_difference, tiny_job

EXACT = 1e-12
NODE = {"workers": "node"}


# --- shares -----------------------------------------------------------------------------------------------


class Alone:
    """A process of a team whose others are never there: it keeps what it would have given them."""

    def __init__(self, place, size):
        self.local_rank, self.size = place, size
        self.checks = 0

    def check(self):
        self.checks += 1

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
@pytest.mark.parametrize("size", [2, 3, 5, 9])
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
    endpoint, _store = GlooTransport(60.0).listen("127.0.0.1")

    def take_part(place):
        team = NodeGroup(place, size, lambda: place in unwanted)
        team.connect(endpoint, "a key")
        return act(team)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(take_part, range(size)))


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
        mine.written.clear()
        count = samples[rank]
        if not count:
            mine.flat_parameters[0].fill_(float("nan"))  # of a process that has nothing to do
        return mine, team.all_reduce(
            mine, PartialGradient(2.0 * team.local_rank, count, 3.0 * team.local_rank, microbatches)
        )

    done = together(len(samples), act)
    total = sum(samples)
    expected = sum(count * value for count, value in zip(samples, values, strict=True)) / total
    mean_place = sum(place * count for place, count in enumerate(samples)) / total
    for mine, part in done:
        assert same(mine.flat_parameters[0], expected[: len(mine.flat_parameters[0])])
        assert len(mine.written) == len(mine.parameters)
        assert part == pytest.approx((2 * mean_place, total, 3 * mean_place, microbatches * len(samples)), rel=EXACT)
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
def test_all_abandon_or_none(unwanted):
    def act(team):
        gradient = Replica(tiny_job(), 3, 2).layout.allocate()
        return outcome(team.check), outcome(lambda: team.all_reduce(gradient, PartialGradient(1.0, 4, 0.0, 0)))

    expected = Interrupted if unwanted else None
    assert together(3, act, unwanted) == [(expected, expected)] * 3


def test_a_version_goes_round():
    layout = Replica(tiny_job(), 3, 2).layout

    def act(team):
        version = layout.allocate()
        version.memory.fill_(7 + team.local_rank)
        team.broadcast(version)
        return int(version.memory.min())

    assert together(3, act) == [7, 7, 7]


@pytest.mark.slow
def test_who_is_slow_is_waited_for():
    def act(team):
        time.sleep(2.0 * team.local_rank)  # longer than to connect
        return outcome(team.check)

    def connecting(*what, **settings):
        return connect(*what, **{**settings, "timeout_s": 1.0})

    connect = GlooTransport.group
    with patch.object(GlooTransport, "group", connecting):
        assert together(2, act) == [None, None]


def test_who_waits_for_a_torn_team_hears_of_it():
    def act(team):
        if team.local_rank == 1:
            time.sleep(0.1)  # the others wait for this one
            team.abort()
        return outcome(team.check)

    begun_s = time.monotonic()
    assert together(3, act) == [NodeGroupLost] * 3
    assert time.monotonic() - begun_s < 5.0


# --- processes --------------------------------------------------------------------------------------------


def simulated(job, n, updates):
    return pl.train(
        job, protocol="bsp", cluster=pl.Cluster(n), stop=pl.Stop(updates=updates), seed=1
    ).model.state_dict()


@pytest.mark.processes
@pytest.mark.parametrize("slices", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_bsp_of_two_hosts_is_bsp_of_two_workers(slices):
    job = tiny_job(batch_size=7)
    torchrun = {**NODE, "slices": slices}
    ends = run(4, job, torchrun, nodes=2, protocol="bsp", stop="updates=15")  # one beside rank 0, two elsewhere
    expected = flat(simulated(job, 2, 15))
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), expected) < EXACT
        assert end.reason == "15 updates made"
    assert {record.worker for record in ends[0].of(GradientArrived)} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "nodes", "n"), [(2, 2, 1), (3, 1, 1), (4, 1, 1), (6, 2, 2)])
def test_groups_of_any_size(world_size, nodes, n):
    job = tiny_job(batch_size=4, microbatches=2, clip_norm=0.5)
    ends = run(world_size, job, NODE, nodes=nodes, protocol="bsp", stop="updates=15")
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), flat(simulated(job, n, 15))) < EXACT


class SlowStep:
    """A step that takes a while, in one process of a host only."""

    def __init__(self, rank, seconds):
        self.rank, self.seconds = rank, seconds

    def __call__(self, model, batch):
        if os.environ["RANK"] == self.rank:
            time.sleep(self.seconds)
        return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.slow
@pytest.mark.parametrize("slow_rank", ["2", "3"], ids=["leader", "follower"])
def test_an_interrupt_ends_the_work_of_all_at_a_microbatch(slow_rank):
    job = tiny_job(loss=None, step=SlowStep(slow_rank, 0.2), batch_size=32, microbatches=16)  # 3.2 s
    quick = {**NODE, "slowness": pl.Cluster(2, timing=[pl.Deterministic(0.05), pl.Deterministic(1e-6)])}
    [end, *others] = run(4, job, quick, nodes=2, protocol="k_sync(k=1)", stop="updates=60")
    interrupted = end.of(WorkInterrupted)
    assert {record.worker for record in interrupted} == {1}
    assert used_by(end, 0) == 60
    assert all(torch.equal(flat(other.parameters), flat(end.parameters)) for other in others)
    begun = [record.now_s for record in interrupted]
    assert end.time_s > 2.0  # so it had not the time to end a single piece of its work
    assert len(begun) >= 5  # and began anew again and again


@pytest.mark.slow
@pytest.mark.parametrize("killed", [2, 3], ids=["leader", "follower"])
def test_a_process_that_dies_takes_its_group_with_it_and_the_group_comes_back(killed):
    epochs, samples = 30, 8 * BATCH
    train = counting_job(samples)
    # The other worker dies too, so that the run waits for this one.
    torchrun = {**NODE, "slowness": pl.Cluster(2, timing=pl.Deterministic(0.03)), "faults": [pl.Fault(0, 60)]}
    with ranks(4, train, torchrun, nodes=2, protocol="bsp", stop=f"epochs={epochs}") as job:
        job.start_all()
        job.await_training()
        job.processes[killed].kill()
        begun_s = time.monotonic()
        with pytest.raises(pl.RunError, match=r"a process of its host is gone|the first process of worker 1 is gone"):
            job.end(5 - killed)
        assert time.monotonic() - begun_s < 10.0
        job.processes[1].join(60)
        job.start(2)
        job.start(3)
        end = job.end(0)
        assert job.end(3).stopped_by == "epochs"
    assert sorted(worker for worker, _ in lost(end)) == [0, 1]
    model = train.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples


class FailingStep:
    """A step that fails in one process."""

    def __init__(self, rank, kind):
        self.rank, self.kind = rank, kind

    def __call__(self, model, batch):
        if os.environ["RANK"] == self.rank:
            raise self.kind("out of order")
        return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.slow
def test_what_goes_wrong_in_a_follower_is_told_by_rank_0():
    with ranks(
        4, tiny_job(loss=None, step=FailingStep("3", ValueError)), NODE, nodes=2, protocol="bsp", stop="updates=9"
    ) as job:
        job.start_all()
        assert lost(job.end(0)) == [(1, "ValueError: out of order")]
        assert "worker 1 failed: ValueError: out of order" in job.said(0)
        assert "Traceback" not in job.said(0)
        with pytest.raises(pl.RunError, match="ValueError: out of order"):
            job.end(2)
        with pytest.raises(ValueError, match="out of order"):
            job.end(3)


@pytest.mark.slow
def test_a_usage_error_of_a_follower_ends_the_run_of_all():
    with ranks(
        3, tiny_job(loss=None, step=FailingStep("2", pl.UsageError)), NODE, protocol="bsp", stop="updates=9"
    ) as job:
        job.start_all()
        for rank in range(3):
            with pytest.raises(pl.UsageError, match="out of order"):
                job.end(rank)


@pytest.mark.slow
@pytest.mark.parametrize("told", [2, 3], ids=["leader", "follower"])
def test_a_group_leaves_as_one(told):
    slow = {**NODE, "slowness": pl.Cluster(2, timing=pl.Deterministic(0.1))}
    with ranks(4, tiny_job(), slow, nodes=2, protocol="asp", stop="updates=40") as job:
        job.start_all()
        job.await_training()
        os.kill(job.processes[told].pid, signal.SIGTERM)
        for rank in (2, 3):
            with pytest.raises(SystemExit) as left:
                job.end(rank)
            assert left.value.code == 128 + signal.SIGTERM
        end = job.end(0)
    assert lost(end) == [(1, "SIGTERM")]
    assert end.stopped_by == "updates"


@pytest.mark.slow
def test_ranks_that_do_not_agree_on_what_a_worker_is():
    with ranks(3, tiny_job(), NODE, protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.start(1)
        job.start(2, seed=2)
        with pytest.raises(pl.UsageError, match=r"process 1 of worker 0 .* differs .*seed 1, now 2"):
            job.end(2)
    with ranks(2, tiny_job(), protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.start(1, torchrun=NODE)
        for rank in range(2):
            with pytest.raises(pl.UsageError, match=r"workers process, now node"):
                job.end(rank)


@pytest.mark.slow
def test_a_group_that_is_not_complete_says_who_is_missing():
    with ranks(4, tiny_job(), {**NODE, "start_timeout_s": 5.0}, protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.start(1)
        with pytest.raises(pl.RunError, match=r"processes 1, 2 of worker 0 did not join within start_timeout_s=5"):
            job.end(1)
        with pytest.raises(pl.RunError, match=r"worker 0 did not join"):
            job.end(0)


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_one_worker_that_is_lost_and_takes_part_again():
    need_hosts()
    slow = {**NODE, "slowness": pl.Cluster(2, timing=pl.Deterministic(0.02))}
    rules = {"protocol": "bsp", "stop": "seconds=15", "worker_timeout_s": 1.5}
    with hosts(2) as made:
        cut = Cut(made, place=1, after=(1, 20), back_after_s=4.0)
        with ranks_on_hosts(made, [0, 0, 1, 1], tiny_job(), slow, [cut], **rules) as job:
            job.start_all()
            ends = [job.end(rank) for rank in range(4)]
    decided = [
        (record.worker, record.kind, record.now_s) for record in ends[0].of(DecisionMade) if record.kind == "lost"
    ]
    assert [worker for worker, _, _ in decided] == [1]
    back = [r.now_s for r in ends[0].of(GradientArrived) if r.worker == 1 and r.used and r.now_s > decided[0][2]]
    assert len(back) > 5
    assert all(torch.equal(flat(end.parameters), flat(ends[0].parameters)) for end in ends)
