"""Ranks without a server that lose one of them: what counts is computed again, and all samples are used once."""

import signal
import threading
from functools import partial
from random import Random

import pytest
import torch
from safetensors.torch import load_file

import paceline as pl
from arrival_replay import arrival_replay, noted_events
from end_when import FOREVER
from machine_speed import scaled
from paceline.core.events import Arrival
from paceline.core.records import GradientArrived, WorkerJoined
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup, Unreachable
from paceline.engines.distributed.announced_sums.rank_parameters import RankParameters
from paceline.engines.distributed.announced_sums.update_follower import UpdateFollower
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.run.config import RunConfig
from paceline.run.session import Session
from paceline.worker.replica import Replica
from paceline.worker.task_runner import TaskRunner
from rank_threads import LIMIT_S, plan_of, ranks
from ranks import flat, lost, used_by
from selections import parametrize_few
from this_process import wait_until
from tiny_jobs import batch_norm_net, largest_relative_difference, tiny_job

EXACT = 1e-12
SUMS = {"server": False}
ADAM = partial(torch.optim.AdamW, lr=0.01)


@pytest.fixture
def events(monkeypatch):
    """Return the events of the run whose rank 0 is this process."""
    return noted_events(monkeypatch)


@pytest.fixture
def recomputed(monkeypatch):
    """Return a list to which the gradients are added that a rank computes for a lost one."""
    heard, recompute = [], UpdateFollower._recompute

    def noting(follower, again):
        heard.append(again)
        return recompute(follower, again)

    monkeypatch.setattr(UpdateFollower, "_recompute", noting)
    return heard


def replayed(job, n, protocol, stop, events, **config):
    """Return the parameters that a server reaches with these events."""
    plan, stop = plan_of(protocol), pl.Stop.parse(stop)
    session = Session(RunConfig(job=job, plan=plan, cluster=pl.Cluster(n), stop=stop, seed=1, **config))
    arrival_replay(pl.Cluster(n), Replica(job, 1, n), session.server, events).run(session.coordinator)
    return flat(session.model.state_dict())


def assert_is_replayed(ends, job, n, protocol, stop, events, **config):
    assert len({tuple(flat(end.parameters).tolist()) for end in ends}) == 1, "all ranks have the same bits"
    expected = replayed(job, n, protocol, stop, events, **config)
    assert largest_relative_difference(flat(ends[0].parameters), expected) < EXACT


def arrived(events):
    """Return the worker and the draw of each gradient that has arrived."""
    return {(each.worker, each.draw) for each in tuple(events) if isinstance(each, Arrival)}


def kill_in_sum(monkeypatch, made, rank, number, *, after):
    """Kill a rank in a sum, before it takes part or when it has the result; return a list that is filled then."""
    fired, can_sum = [], UpdateFollower._can_sum

    def killing(follower, gradients):
        killed = made.processes[rank]
        is_here = not fired and follower._made + 1 == number and follower._transport is killed._own_transport
        if is_here and not after:
            fired.append(number)
            killed.kill()
        summed = can_sum(follower, gradients)
        if is_here and after:
            fired.append(number)
            killed.kill()
        return summed

    monkeypatch.setattr(UpdateFollower, "_can_sum", killing)
    return fired


LOST = [("bsp", 4, 15), ("k_sync(k=2)", 5, 15), ("pull(k=200)", 3, 2), ("balanced(m=4)", 7, 15), ("dbw", 5, 15)]


@parametrize_few(("protocol", "draw", "updates"), LOST, keep=3)
def test_a_lost_rank_costs_no_gradient_that_counts(protocol, draw, updates, events, recomputed, tmp_path):
    faults = {"faults": [pl.Fault(worker=1, draw=draw, kind="die")]}
    job = tiny_job(model=batch_norm_net, sampling="epoch")
    settings = {"protocol": protocol, "stop": f"updates={updates}"}
    with ranks(3, job, SUMS | faults, **settings, out=tmp_path / "run") as made:
        made.start_workers()
        end = made.serve()
        assert made.faults("die") == 1
        ends = [end, made.end(2)]
    assert end.stopped_by == "updates"
    assert [worker for worker, _ in lost(end)] == [1]
    if protocol == "pull(k=200)":
        assert sorted((each.worker, each.draw) for each in recomputed) == [(1, 1), (1, 2)], "what it had"
    assert_is_replayed(ends, job, 3, **settings, events=events)
    assert pl.replay(tmp_path / "run").is_same


IN_SUM = [("bsp", 2, False), ("bsp", 2, True), ("bsp", "beside", True), ("pull(k=5)", 1, True), ("dbw", "beside", True)]


@parametrize_few(("protocol", "rank", "after"), IN_SUM, keep=2)
def test_a_rank_is_lost_within_a_sum(protocol, rank, after, events, monkeypatch):
    job, settings = tiny_job(sampling="epoch"), {"protocol": protocol, "stop": "updates=20"}
    with ranks(3, job, SUMS, **settings) as made:
        fired = kill_in_sum(monkeypatch, made, rank, 6, after=after)
        made.start_workers()
        end = made.serve()
        ends = [end, *(made.end(each) for each in {1, 2} - {rank})]
    assert fired
    assert end.stopped_by == "updates"
    assert_is_replayed(ends, job, 3, **settings, events=events)


@parametrize_few("protocol", ["bsp", "pull(k=5)", "balanced(m=4)"], keep=1)
def test_a_rank_that_comes_back_goes_on_with_the_others(protocol, events):
    faults = {"faults": [pl.Fault(worker=1, draw=4, kind="die")]}
    slow = pl.Cluster(3, timing=pl.timing.Deterministic(0.02))
    job, settings = tiny_job(optimizer=ADAM), {"protocol": protocol, "stop": "updates=40"}
    with ranks(3, job, SUMS | faults | {"slowness": slow}, **settings) as made:
        made.start_workers()
        made.when_ended(1, lambda: made.start(1, torchrun={"faults": []}))
        end = made.serve()
        ends = [end, made.end(1), made.end(2)]
    assert [each.worker for each in end.of(WorkerJoined)] == [1]
    assert end.of(GradientArrived)[-1].draw > 10
    assert used_by(end, 1) > 4, "it takes part again"
    assert_is_replayed(ends, job, 3, **settings, events=events)


@pytest.mark.slow
def test_a_rank_that_hangs_while_it_computes_a_lost_gradient_is_left_behind(events, monkeypatch):
    """The coordinator handles no timer while the ranks recover, so the whole run would wait for it."""
    hung, release, compute = [], threading.Event(), TaskRunner.lost_gradient

    def hang_once(runner, *args, **more):
        if runner._worker == 2 and not hung:
            hung.append(runner)
            release.wait(LIMIT_S)
        return compute(runner, *args, **more)

    monkeypatch.setattr(TaskRunner, "lost_gradient", hang_once)
    job, settings = tiny_job(), {"protocol": "pull(k=200)", "stop": "updates=2", "worker_timeout_s": scaled(0.5)}
    with ranks(4, job, SUMS | {"faults": [pl.Fault(worker=1, draw=6, kind="die")]}, **settings) as made:
        made.start_workers()
        end = made.serve()
        release.set()
        assert made.faults("die") == 1
    assert hung
    assert end.stopped_by == "updates"
    assert [worker for worker, _ in lost(end)][:2] == [1, 2]  # that wait may be taken for the silence of others
    assert_is_replayed([end], job, 4, **settings, events=events)


def test_a_rank_dies_when_the_others_have_begun_to_sum_an_update_in_its_group(events):
    timing = [pl.timing.Deterministic(seconds) for seconds in (0.001, scaled(0.2), 0.001)]
    job, settings = tiny_job(), {"protocol": "bsp", "stop": "updates=12"}
    with ranks(3, job, SUMS | {"slowness": pl.Cluster(3, timing)}, **settings) as made:
        made.start_workers()

        def kill():
            wait_until(lambda: {(0, 4), (2, 4)} <= arrived(events))
            made.processes[1].kill()

        killing = threading.Thread(target=kill)
        killing.start()
        end = made.serve()
        killing.join()
        assert (1, 4) not in arrived(events), "the rank has died before its gradient of this update"
        assert_is_replayed([end, made.end(2)], job, 3, **settings, events=events)
    assert [worker for worker, _ in lost(end)] == [1]


def test_a_rank_that_is_asked_to_end_leaves_the_others_in_the_run(events):
    slow = pl.Cluster(3, timing=pl.timing.Deterministic(0.01))
    job, settings = tiny_job(), {"protocol": "bsp", "stop": "updates=30"}
    with ranks(3, job, SUMS | {"slowness": slow}, **settings) as made:
        made.start_workers()

        def leave():
            made.await_training()
            made.processes[1].leave("SIGTERM")

        leaving = threading.Thread(target=leave)
        leaving.start()
        end = made.serve()
        leaving.join()
        with pytest.raises(SystemExit) as left:
            made.end(1)
        assert left.value.code == 128 + signal.SIGTERM
        assert_is_replayed([end, made.end(2)], job, 3, **settings, events=events)
    assert lost(end) == [(1, "SIGTERM")]


def test_ranks_that_all_leave_leave_their_parameters(tmp_path):
    slow = pl.Cluster(2, timing=pl.timing.Deterministic(0.01))
    settings = {"protocol": "bsp", "stop": FOREVER, "out": tmp_path / "run"}
    with ranks(2, tiny_job(), SUMS | {"slowness": slow, "start_timeout_s": scaled(1.0)}, **settings) as made:
        made.start_all()
        made.await_training()
        for each in (1, "beside"):
            made.processes[each].leave("SIGTERM")
        end = made.end(0)
    assert end.stopped_by == "no_workers"
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(saved[name], each) for name, each in end.parameters.items())
    assert pl.replay(tmp_path / "run").is_same


def fail_sums(monkeypatch, made, rank, number, times):
    """Let sums fail at a rank that lives, from this number on, so many times; return a list that is filled then."""
    fired, begin_sum = [], UpdateFollower._can_sum

    def failing(follower, gradients):
        is_here = follower._transport is made.processes[rank]._own_transport and follower._made + 1 >= number
        if is_here and len(fired) < times:
            fired.append(number)
            follower._groups.break_off()
        return begin_sum(follower, gradients)

    monkeypatch.setattr(UpdateFollower, "_can_sum", failing)
    return fired


@parametrize_few("protocol", ["bsp", "pull(k=5)"], keep=1)
def test_a_sum_that_fails_among_living_ranks_begins_anew(protocol, events, monkeypatch):
    job, settings = tiny_job(sampling="epoch"), {"protocol": protocol, "stop": "updates=12"}
    with ranks(3, job, SUMS, **settings) as made:
        fired = fail_sums(monkeypatch, made, 2, 4, times=2)
        made.start_workers()
        end = made.serve()
        ends = [end, made.end(1), made.end(2)]
    assert len(fired) == 2
    assert lost(end) == []
    assert_is_replayed(ends, job, 3, **settings, events=events)


@parametrize_few("protocol", ["bsp", "balanced(m=4)"], keep=1)
def test_a_rank_without_the_result_of_a_sum_gets_the_state_of_one_that_has_it(protocol, events, monkeypatch):
    brought, can_sum, take_state = [], UpdateFollower._can_sum, RankParameters.take_state

    def losing(follower, gradients):
        summed = can_sum(follower, gradients)
        if follower._transport is made.processes[2]._own_transport and follower._made + 1 == 4 and not brought:
            follower._parameters.renew_total()
            follower._report(follower._generation, ConnectionLost("cut after the sum"))
            follower._recover()
            return False
        return summed

    def noting(parameters, number, state):
        brought.append(state)
        take_state(parameters, number, state)

    monkeypatch.setattr(UpdateFollower, "_can_sum", losing)
    monkeypatch.setattr(RankParameters, "take_state", noting)
    job, settings = tiny_job(sampling="epoch", optimizer=ADAM), {"protocol": protocol, "stop": "updates=12"}
    with ranks(3, job, SUMS, **settings) as made:
        made.start_workers()
        end = made.serve()
        ends = [end, made.end(1), made.end(2)]
    assert len(brought) == 1
    assert_is_replayed(ends, job, 3, **settings, events=events)


def test_ranks_that_cannot_reach_each_other_end_the_run(monkeypatch):
    connect, first = ElasticGroup.connect, []

    def cut(group, *arguments):
        if group.size > 2 and group.rank == 1:
            first.append(group)
            if len(first) > 1:  # the first group of all ranks forms
                raise Unreachable("no route to host")
        connect(group, *arguments)

    monkeypatch.setattr(ElasticGroup, "connect", cut)
    with ranks(3, tiny_job(), SUMS, protocol="bsp", stop=FOREVER) as made:
        fired = fail_sums(monkeypatch, made, 2, 4, times=1)
        made.start_workers()
        with pytest.raises(pl.RunError, match=r"worker 1 does not reach all other ranks, .* \(no route to host\)"):
            made.serve()
    assert fired
    assert len(first) >= 4


def test_a_run_may_begin_without_a_rank_that_joins_later(events):
    slow = pl.Cluster(3, timing=pl.timing.Deterministic(0.02))
    elastic = {"min_workers": 1, "start_timeout_s": scaled(1.0), "slowness": slow}
    job, settings = tiny_job(), {"protocol": "bsp", "stop": "updates=60"}
    with ranks(3, job, SUMS | elastic, **settings) as made:
        made.start(1)

        def join():
            made.await_training()
            made.start(2)

        threading.Thread(target=join, daemon=True).start()
        end = made.serve()
        ends = [end, made.end(1), made.end(2)]
    assert [each.worker for each in end.of(WorkerJoined)] == [2]
    assert used_by(end, 2) > 1
    assert_is_replayed(ends, job, 3, **settings, events=events)


def test_the_loss_of_all_ranks_ends_the_run():
    faults = {"faults": [pl.Fault(worker=worker, draw=4, kind="die") for worker in range(2)]}
    with ranks(2, tiny_job(), SUMS | faults, protocol="bsp", stop=FOREVER) as made:
        made.start_workers()
        with pytest.raises(pl.RunError, match="all ranks are gone, and with them the newest parameters: paceline run"):
            made.serve()
        assert made.faults("die") == 2


SCRIPTS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 25))]


def die_at_the_next_task(monkeypatch):
    """Let the fault of a draw that is interrupted before it begins occur in the next one that begins."""
    inject = TaskRunner._inject_fault

    def injecting(runner, draw, step=1):
        for number in [each for each in runner._faults if each < draw]:
            runner._faults[draw] = runner._faults.pop(number)
        inject(runner, draw, step)

    monkeypatch.setattr(TaskRunner, "_inject_fault", injecting)


def with_deaths(random, job, monkeypatch, **settings):
    """Return what the ranks have at the end of a run in which three of them die, one in a sum, and come back."""
    die_at_the_next_task(monkeypatch)
    slow = pl.Cluster(4, timing=pl.timing.Exponential(0.01))
    faults = [pl.Fault(worker=worker, draw=random.randint(2, 12), kind="die") for worker in (1, 2)]
    with ranks(4, job, SUMS | {"faults": faults, "slowness": slow}, **settings) as made:
        fired = kill_in_sum(monkeypatch, made, 3, random.randint(3, 12), after=random.random() < 0.5)
        made.start_workers()
        for rank in (1, 2, 3):
            made.when_ended(rank, lambda rank=rank: made.start(rank, torchrun={"faults": []}))
        end = made.serve()
        came_back = {each.worker for each in end.of(WorkerJoined)}  # else after the end
        ends = [end, *(made.end(rank) for rank in came_back)]
        assert made.faults("die") == 2
    assert fired
    assert sorted(worker for worker, _ in lost(end)) == [1, 2, 3]
    assert end.stopped_by == "updates"
    return ends


@pytest.mark.parametrize("seed", SCRIPTS)
def test_deaths_and_returns_cost_no_sample(seed, events, monkeypatch):
    random = Random(seed)
    protocol = random.choice(["bsp", "pull(k=7)", "balanced(m=4)", "k_sync(k=2)", "k_batch_sync(k=5)"])
    job, settings = tiny_job(sampling="epoch", optimizer=ADAM), {"protocol": protocol, "stop": "updates=60"}
    ends = with_deaths(random, job, monkeypatch, **settings)
    assert_is_replayed(ends, job, 4, **settings, events=events)


@parametrize_few(
    ("protocol", "seed"), [(each, i) for i in range(4) for each in ("k_async(k=2)", "k_batch_async(k=3)")], keep=2
)
def test_deaths_leave_equal_ranks_also_with_stale_gradients(protocol, seed, monkeypatch, tmp_path):
    settings = {"protocol": protocol, "stop": "updates=60", "out": tmp_path / "run"}
    ends = with_deaths(Random(seed), tiny_job(sampling="epoch", optimizer=ADAM), monkeypatch, **settings)
    assert len({tuple(flat(end.parameters).tolist()) for end in ends}) == 1, "all ranks have the same bits"
    assert max(each.staleness for each in ends[0].of(GradientArrived) if each.used) > 0
    assert pl.replay(tmp_path / "run").is_same
