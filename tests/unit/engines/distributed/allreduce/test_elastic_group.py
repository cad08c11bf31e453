"""Elastic group: which processes can join, and what ends the waiting of its members."""

import os
import signal
import threading
import time
from contextlib import closing, suppress

import pytest
import torch
from torch import nn

import paceline as pl
from group_members import Wire, peer, server_with
from machine_speed import scaled
from paceline.core.records import WorkerLost
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup, MembershipChanged, MissingPeers
from paceline.engines.distributed.transport import process_group as process_group_module
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.process_group import AbortableGroup, PendingCollective
from paceline.engines.distributed.transport.sum_messages import GroupBroken
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from rank_threads import run
from ranks import ranks
from sum_groups import HOST, stores, transport
from this_process import in_thread, torn
from tiny_jobs import dataset, tiny_job

LATE_S = 0.9
SIZE = 1_000_000  # numbers


@pytest.fixture
def connecting():
    with closing(transport()) as made:
        yield made


def test_a_process_that_finds_the_sockets_of_gloo_but_does_not_have_the_key_cannot_join(connecting):
    ours, theirs = stores(2)
    thread, raised = in_thread(lambda: ElasticGroup("a secret", 0, 2, ours).connect(connecting, HOST))
    theirs.set("ready/1", b"")
    stranger = connecting.group(theirs, 1, 2, HOST)
    received = torch.zeros(2, 32, dtype=torch.uint8)
    stranger.alltoall_base(received, torch.zeros_like(received), [], [])
    thread.join(scaled(10))
    assert [str(error) for error in raised] == ["a process in the group does not have its key"]


def test_members_that_do_not_come_are_named(connecting):
    ours, theirs, _ = stores(3)
    theirs.set("ready/1", b"")
    with pytest.raises(MissingPeers) as absent:
        ElasticGroup("a secret", 0, 3, ours).connect(connecting, HOST, timeout_s=0.05)
    assert absent.value.ranks == [2]


def test_a_group_can_be_aborted_while_others_are_awaited(connecting):
    ours, theirs, _ = stores(3)
    group = ElasticGroup("a secret", 0, 3, ours)
    thread, raised = in_thread(lambda: group.connect(connecting, HOST))
    theirs.get("ready/0")
    group.abort()
    thread.join(scaled(1.0))
    assert [str(error) for error in raised] == ["the group was aborted"]


# --- gloo does not report the end of every connection ---------------------------------------------------------


def some_vectors(memory=None):
    layout = FlatLayout(wide())
    return FlatBuffers(layout, memory.view(torch.uint8)) if memory is not None else layout.allocate()


@pytest.fixture
def two_groups(connecting):
    """Return the two members of a group."""
    groups = [ElasticGroup("a secret", place, 2, store) for place, store in enumerate(stores(2))]
    other, _ = in_thread(lambda: groups[1].connect(connecting, HOST))
    groups[0].connect(connecting, HOST)
    other.join()
    yield groups
    for group in groups:
        group.abort()


def test_a_local_abort_ends_the_wait_for_a_sum_though_gloo_waits_on(two_groups):
    ours, _ = two_groups  # who is there, and never begins
    begun = ours.begin_sum(some_vectors())
    waiting, raised = in_thread(lambda: ours.wait(begun))
    assert not ours.wait(begun, timeout_s=0.1)
    ours.abort_locally()
    waiting.join(scaled(1.0))
    assert [str(error) for error in raised] == ["the group was aborted"]
    assert not any(each.work.is_completed() for each in begun)
    begun_s = time.monotonic()
    ours.close()  # which does not wait for gloo for ever
    assert time.monotonic() - begun_s < 2 * process_group_module.CLOSE_TIMEOUT_S


def test_a_broken_group_is_noticed_by_rank_0_only(two_groups):
    ours, theirs = two_groups
    member = peer(1, Wire())
    server = server_with(member)
    server.group = ours
    begun = ours.begin_sum(some_vectors())
    waiting, raised = in_thread(lambda: server.wait(begun, 60.0))
    server.on_message(member, GroupBroken(0, "the link is cut", False))
    waiting.join(scaled(5.0))
    assert [type(error) for error in raised] == [MembershipChanged]
    assert theirs.wait(theirs.begin_sum(some_vectors()), 5.0)  # the others would only repeat it


class Lost:
    """Work of which gloo says nothing any more: what a pair was just sending, or receiving, when it ended."""

    def is_completed(self):
        return False

    def wait(self, timeout):
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")


def test_the_wait_for_a_sum_ends_when_a_connection_has_ended_though_gloo_does_not_report_it(two_groups, monkeypatch):
    monkeypatch.setattr(process_group_module, "PROBE_INTERVAL_S", 0.1)
    ours, theirs = two_groups
    begun = [PendingCollective(Lost(), False, time.monotonic())]
    assert not ours.wait(begun, timeout_s=0.3)  # they are still connected
    theirs.abort()
    with pytest.raises(ConnectionLost, match="onnection"):
        ours.wait(begun, timeout_s=scaled(5.0))
    ours.complete()
    assert not ours.wait(begun, timeout_s=0.3)  # who leaves now is through


def wide():
    return nn.Linear(5, SIZE // 5, bias=False)


def mean_square(given, _):
    return given.square().mean()


def die_in_the_midst_of_the_third_sum():
    begin, begun = ElasticGroup.begin_sum, []

    def begin_and_die(group, vectors):
        begun.append(group)
        if len(begun) < 3:
            return begin(group, vectors)
        with suppress(ConnectionLost):  # where gloo's own thread sends, it ends the process
            group.wait(begin(group, some_vectors(torn(SIZE))))
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    ElasticGroup.begin_sum = begin_and_die


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["s3gd", "dc_s3gd", "all_reduce", "local_sgd(H=1)"])
def test_the_remaining_ranks_continue_when_a_rank_ends_in_the_middle_of_a_sum(protocol):
    job = tiny_job(model=wide, loss=mean_square, data=dataset(dtype=torch.float32))
    with ranks(3, job, {"min_workers": 1}, protocol=protocol, stop="updates=8") as started:
        started.start(1)
        started.start(2, prepare=die_in_the_midst_of_the_third_sum)
        end = started.serve()
        other = started.end(1)
    assert [lost.worker for lost in end.of(WorkerLost)] == [2]
    assert [update.k for update in end.of(pl.callbacks.UpdateMade)] == [3] * 2 + [2] * 6
    assert all(torch.equal(end.parameters[name], other.parameters[name]) for name in end.parameters)


# --- a sum that takes longer than anybody is waited for -------------------------------------------------------


class Late:
    """A sum to which this rank's part comes late, as it does over a slow link."""

    def __init__(self, begin):
        self._thread = threading.Thread(target=self._begin, args=[begin], daemon=True)
        self._thread.start()

    def _begin(self, begin):
        time.sleep(LATE_S)
        self._work = begin()

    def wait(self, timeout):
        self._thread.join(timeout.total_seconds())
        return not self._thread.is_alive() and self._work.wait(timeout)

    def is_completed(self):
        return not self._thread.is_alive() and self._work.is_completed()

    def get_future(self):
        return self

    def add_done_callback(self, note):
        threading.Thread(target=self._add_done_callback, args=[note], daemon=True).start()

    def _add_done_callback(self, note):
        self._thread.join()
        self._work.get_future().add_done_callback(note)


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True])
def test_a_sum_may_take_longer_than_a_silent_worker_is_waited_for(elastic, monkeypatch):
    begin, begun = AbortableGroup.all_reduce, []

    def slow(group, *what):
        if group._rank == 0:
            return begin(group, *what)
        begun.append(what)
        if len(begun) != 3:
            return begin(group, *what)
        return PendingCollective(Late(lambda: begin(group, *what).work), False, time.monotonic())

    monkeypatch.setattr(AbortableGroup, "all_reduce", slow)
    settings = {"protocol": "all_reduce", "stop": "updates=5", "worker_timeout_s": LATE_S / 3}
    end = run(2, tiny_job(), {"min_workers": 1 if elastic else None}, **settings)[0]
    assert [update.k for update in end.of(pl.callbacks.UpdateMade)] == [2] * 5
    assert end.time_s > LATE_S


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["all_reduce", "dc_s3gd", "local_sgd(H=4)"])
def test_a_rank_that_hangs_is_found_wherever_the_others_wait_for_it(protocol):
    faults = [
        pl.Fault(worker=1, draw=6, kind="hang")
    ]  # under local_sgd the others are summing up for an evaluation then
    settings = {"protocol": protocol, "stop": "updates=30", "evaluate_every": "updates=5", "worker_timeout_s": 1.5}
    with ranks(3, tiny_job(eval_data=tiny_job().data), {"faults": faults, "min_workers": 1}, **settings) as job:
        job.start_workers()
        [lost] = job.serve().of(WorkerLost)
    assert (lost.worker, lost.reason[-16:]) == (1, "silent for 1.5 s")


@pytest.mark.slow
def test_a_rank_that_hangs_while_another_one_dies_is_not_waited_for_for_ever():
    torchrun = {"faults": [pl.Fault(worker=1, draw=9, kind="hang"), pl.Fault(worker=2, draw=9)], "min_workers": 1}
    settings = {"protocol": "all_reduce", "stop": "updates=30", "worker_timeout_s": 1.5}
    with ranks(3, tiny_job(), torchrun, **settings) as job:
        job.start_workers()
        end = job.serve()
    assert sorted(lost.worker for lost in end.of(WorkerLost)) == [1, 2]
    assert end.time_s < 15.0


@pytest.mark.slow
def test_a_second_rank_that_dies_while_the_ring_forms_costs_no_more_than_the_first(monkeypatch):
    connect, calls = ElasticGroup.connect, []

    def connecting(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            job.processes[3].kill()
        return connect(*arguments)

    monkeypatch.setattr(ElasticGroup, "connect", connecting)
    torchrun = {
        "faults": [pl.Fault(worker=2, draw=9)],
        "min_workers": 1,
        "slowness": pl.Cluster(4, timing=pl.timing.Deterministic(0.05)),
    }
    with ranks(4, tiny_job(), torchrun, protocol="all_reduce", stop="updates=30") as job:
        job.start_workers()
        end = job.serve()
    assert [lost.worker for lost in end.of(WorkerLost)] == [2, 3]
    assert end.time_s < 10.0
