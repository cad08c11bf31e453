"""Rings of workers without a server: who can take a place, and what ends the waiting of those who have one."""

import os
import signal
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.records import WorkerLost
from paceline.engines.distributed.allreduce import membership as head_module
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup, MissingPeers
from paceline.engines.distributed.allreduce.member import MembershipClient
from paceline.engines.distributed.allreduce.membership import MembershipServer
from paceline.engines.distributed.allreduce.messages import MembershipChanged
from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer, Gate, PeerJoined
from paceline.engines.distributed.rendezvous.rendezvous import Rendezvous
from paceline.engines.distributed.transport import process_group as collective
from paceline.engines.distributed.transport.connection import ConnectionLost, dist, gloo
from paceline.engines.distributed.transport.process_group import AbortableGroup, PendingCollective
from paceline.server.flat_buffers import FlatBuffers, FlatLayout
from ranks import ranks
from this_process import in_thread, torn, what_is_open
from tiny_jobs import dataset, tiny_job

LATE_S = 1.5
SIZE = 1_000_000  # numbers


@pytest.fixture
def meeting():
    return Rendezvous.on("127.0.0.1", silence_s=5.0)


def found(store):
    """Return under what a ring meets at a store that tells all it has."""
    while not (here := [key for key in store.list_keys() if key.endswith("/here/0")]):
        time.sleep(0.01)
    return here[0].removeprefix("/").removesuffix("/here/0")


def test_who_finds_the_ring_in_the_store_but_does_not_know_its_key_cannot_take_a_place(meeting):
    thread, raised = in_thread(lambda: ElasticGroup("a secret", 0, 2).connect(meeting.place, 5.0))
    store = dist.PrefixStore(found(meeting.place.client()), meeting.place.client())
    store.set("here/1", "here")
    stranger = gloo(store, 1, 2, meeting.place.device)
    told = torch.zeros(2, 32, dtype=torch.uint8)
    stranger.alltoall_base(told, torch.zeros_like(told), [], [])
    thread.join(10)
    assert [str(error) for error in raised] == ["somebody in the ring does not know its key"]


def test_those_who_do_not_know_the_same_key_do_not_meet(meeting):
    thread, _ = in_thread(lambda: ElasticGroup("a secret", 1, 2).connect(meeting.place, 5.0, timeout_s=0.5))
    with pytest.raises(MissingPeers) as absent:
        ElasticGroup("a guess", 0, 2).connect(meeting.place, 5.0, timeout_s=0.5)
    assert absent.value.places == [1]
    thread.join()


def test_a_ring_can_be_left_while_others_are_waited_for(meeting):
    ring = ElasticGroup("a secret", 0, 3)
    thread, raised = in_thread(lambda: ring.connect(meeting.place, 5.0))
    found(meeting.place.client())
    ring.break_off()
    thread.join(1.0)
    assert [str(error) for error in raised] == ["somebody has left"]


# --- gloo does not tell everybody of the end of a connection --------------------------------------------------


def some_vectors(memory=None):
    layout = FlatLayout(wide())
    return FlatBuffers(layout, memory.view(torch.uint8)) if memory is not None else layout.allocate()


@pytest.fixture
def two_rings(meeting):
    """Return the two ends of a ring."""
    rings = [ElasticGroup("a secret", place, 2) for place in range(2)]
    other, _ = in_thread(lambda: rings[1].connect(meeting.place, 5.0))
    rings[0].connect(meeting.place, 5.0)
    other.join()
    yield rings
    for ring in rings:
        ring.break_off()


def test_whoever_waits_for_a_sum_hears_that_the_ring_is_left_though_gloo_waits_on(two_rings):
    ours, _ = two_rings  # who is there, and never begins
    begun = ours.begin_sum(some_vectors())
    waiting, raised = in_thread(lambda: ours.wait(begun))
    assert not ours.wait(begun, timeout_s=0.1)
    ours.give_up()
    waiting.join(1.0)
    assert [str(error) for error in raised] == ["somebody has left"]
    assert not any(each.work.is_completed() for each in begun)
    begun_s = time.monotonic()
    ours.let_go()  # which does not wait for gloo for ever
    assert time.monotonic() - begun_s < 2 * collective.STUCK_S


def test_who_cannot_sum_any_more_is_heard_by_rank_0_and_by_nobody_else(two_rings):
    ours, theirs = two_rings
    head = head_with(AcceptedPeer(1, Wire(), "worker 1", True))
    head.ring = ours
    begun = ours.begin_sum(some_vectors())
    waiting, raised = in_thread(lambda: head.wait(begun, 60.0))
    head.hear(1, 1, {"broken": "the link is cut", "generation": 0, "is_apart": False})
    waiting.join(5.0)
    assert [type(error) for error in raised] == [MembershipChanged]
    assert theirs.wait(theirs.begin_sum(some_vectors()), 5.0)  # the others would only repeat it


class Lost:
    """Work of which gloo says nothing any more: what a pair was just sending, or receiving, when it ended."""

    def is_completed(self):
        return False

    def wait(self, timeout):
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")


def test_whoever_waits_for_a_sum_sees_that_a_connection_has_ended_though_nobody_says_so(two_rings, monkeypatch):
    monkeypatch.setattr(collective, "PROBE_S", 0.1)
    ours, theirs = two_rings
    begun = [PendingCollective(Lost(), False, time.monotonic())]
    assert not ours.wait(begun, timeout_s=0.3)  # they are still connected
    theirs.break_off()
    with pytest.raises(ConnectionLost, match="onnection"):
        ours.wait(begun, timeout_s=5.0)
    ours.end()
    assert not ours.wait(begun, timeout_s=0.3)  # who leaves now is through


def wide():
    return nn.Linear(5, SIZE // 5, bias=False)


def mean_square(given, _):
    return given.square().mean()


def die_in_the_midst_of_the_third_sum():
    begin, begun = ElasticGroup.begin_sum, []

    def begin_and_die(ring, vectors):
        begun.append(ring)
        if len(begun) < 3:
            return begin(ring, vectors)
        with suppress(ConnectionLost):  # where gloo's own thread sends, it ends the process
            ring.wait(begin(ring, some_vectors(torn(SIZE))))
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    ElasticGroup.begin_sum = begin_and_die


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["s3gd", "dc_s3gd", "all_reduce", "local_sgd(H=1)"])
def test_those_who_are_left_go_on_when_somebody_has_died_in_the_midst_of_a_sum(protocol):
    job = tiny_job(model=wide, loss=mean_square, data=dataset(dtype=torch.float32))
    with ranks(3, job, {"elastic": True}, protocol=protocol, stop="updates=8") as started:
        started.start(1)
        started.start(2, prepare=die_in_the_midst_of_the_third_sum)
        end = started.serve()
        other = started.end(1)
    assert [lost.worker for lost in end.of(WorkerLost)] == [2]
    assert [update.k for update in end.of(pl.UpdateMade)] == [3] * 2 + [2] * 6
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


def let_the_third_sum_be_slow():
    begin, begun = AbortableGroup.all_reduce, []

    def slow(*what):
        begun.append(what)
        return (
            PendingCollective(Late(lambda: begin(*what).work), False, time.monotonic())
            if len(begun) == 3
            else begin(*what)
        )

    AbortableGroup.all_reduce = slow


@pytest.mark.processes
@pytest.mark.parametrize("elastic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sum_may_take_longer_than_a_silent_worker_is_waited_for(elastic):
    settings = {"protocol": "all_reduce", "stop": "updates=5", "worker_timeout_s": 1.0}
    with ranks(2, tiny_job(), {"elastic": elastic}, **settings) as job:
        job.start(1, prepare=let_the_third_sum_be_slow)
        end = job.serve()
    assert [update.k for update in end.of(pl.UpdateMade)] == [2] * 5
    assert end.time_s > LATE_S


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["all_reduce", "dc_s3gd", "local_sgd(H=4)"])
def test_a_rank_that_hangs_is_found_wherever_the_others_wait_for_it(protocol):
    faults = [pl.Fault(1, 6, "hang")]  # under local_sgd the others are summing up for an evaluation then
    settings = {"protocol": protocol, "stop": "updates=30", "evaluate_every": "updates=5", "worker_timeout_s": 1.5}
    with ranks(3, tiny_job(eval_data=tiny_job().data), {"faults": faults, "elastic": True}, **settings) as job:
        job.start_workers()
        [lost] = job.serve().of(WorkerLost)
    assert (lost.worker, lost.reason[-16:]) == (1, "silent for 1.5 s")


@pytest.mark.slow
def test_a_rank_that_hangs_while_another_one_dies_is_not_waited_for_for_ever():
    torchrun = {"faults": [pl.Fault(1, 9, "hang"), pl.Fault(2, 9)], "elastic": True}
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
    torchrun = {"faults": [pl.Fault(2, 9)], "elastic": True, "slowness": pl.Cluster(4, timing=pl.Deterministic(0.05))}
    with ranks(4, tiny_job(), torchrun, protocol="all_reduce", stop="updates=30") as job:
        job.start_workers()
        end = job.serve()
    assert [lost.worker for lost in end.of(WorkerLost)] == [2, 3]
    assert end.time_s < 10.0


# --- what goes wrong beside the vectors -----------------------------------------------------------------------


class Wire:
    """A line that notes what is told, and over which comes what was given to it, and then nothing."""

    def __init__(self, *coming):
        self.told = []
        self._coming = iter(coming)

    def tell(self, text, **_):
        self.told.append(text)

    def receive(self):
        return next(self._coming, None) or threading.Event().wait()

    def settle(self):
        pass

    def close(self):
        pass


class Torn:
    """A ring that cannot be begun with."""

    def begin_sum(self, vectors):
        raise ConnectionLost("cut off")

    def break_off(self):
        pass


def cluster(**changes):
    settings = {"elastic": False, "silence_s": 5.0, "worker": 1, "start_timeout_s": 5.0, "n": 3}
    return SimpleNamespace(**{**settings, "has_gpu_each": lambda gpus: True, **changes})


def head_with(*members, **changes):
    head = MembershipServer(cluster(**changes), {}, lambda: 0.0)
    head._meeting = SimpleNamespace(place=None)
    for worker, member in enumerate(members, start=1):
        head.enter(worker, member)
    return head


class Formed(Exception):  # noqa: N818  # which ends a test
    """Everybody has been told to form a ring."""


@pytest.fixture
def stops_when_formed(monkeypatch):
    def connect(*_):
        raise Formed

    monkeypatch.setattr(ElasticGroup, "connect", connect)
    monkeypatch.setattr(head_module, "GRACE_S", 0.05)


def test_somebody_who_leaves_while_others_are_told_to_form_a_ring_disturbs_nobody(stops_when_formed):
    wires = [Wire(), Wire()]
    head = head_with(
        *(AcceptedPeer(number, wire, f"worker {number}", True) for number, wire in enumerate(wires, start=1))
    )
    tell = wires[0].tell

    def tell_while_the_other_one_leaves(text, **_):
        thread, _ = in_thread(lambda: head.leave(2, 2, "gone"))
        thread.join(0.1)
        tell(text)

    wires[0].tell = tell_while_the_other_one_leaves
    with pytest.raises(Formed):
        head.form(lambda events: {}, 1.0)
    assert [wire.told[0]["place"] for wire in wires] == [1, 2]


@pytest.mark.parametrize("theirs", [[True, True], [True, False]])
@pytest.mark.parametrize("ours", [True, False])
def test_gpus_add_up_where_every_process_has_its_own_and_each_ring_has_another_key(theirs, ours, stops_when_formed):
    wires = [Wire(), Wire()]
    members = [
        AcceptedPeer(number, wire, "", has) for number, (wire, has) in enumerate(zip(wires, theirs, strict=True))
    ]
    head = head_with(*members, elastic=True, has_gpu_each=lambda gpus: ours)
    for _ in range(2):
        with pytest.raises(Formed):
            head.form(lambda events: {}, 1.0)
    told = [form for wire in wires for form in wire.told]
    assert {form["uses_nccl"] for form in told} == {ours and all(theirs)}
    assert {len(form["key"]) for form in told} == {64}
    assert len({form["key"] for form in told}) == 2


def test_why_a_ring_has_broken_is_told(stops_when_formed):
    head = head_with(AcceptedPeer(1, Wire(), "worker 1 (here)", True))
    with pytest.raises(Formed):
        head.form(lambda events: {}, 1.0)
    head.hear(1, 1, {"broken": "no such numbers", "generation": 1, "is_apart": False})
    with pytest.raises(pl.RunError, match=r"worker 1 \(here\) .* \(worker 1: no such numbers\)"):
        head.form(lambda events: {}, 1.0)


def test_a_sum_that_cannot_be_begun_is_as_one_that_breaks():
    head = head_with()
    head.ring = Torn()
    with pytest.raises(MembershipChanged, match="cut off"):
        head.begin_sum(None)
    rank = MembershipClient(cluster(), {})
    rank.ring, rank._line = Torn(), Wire({"form": 2, "key": "a secret", "place": 1, "size": 2, "uses_nccl": False})
    in_thread(rank._listen)
    with pytest.raises(MembershipChanged):
        rank.begin_sum(None)
    assert rank._line.told == [{"broken": "cut off", "generation": 0, "is_apart": False}]


def test_what_goes_wrong_in_a_thread_that_listens_is_raised_where_it_is_waited_for():
    rank = MembershipClient(cluster(), {})
    rank._line = Wire({"table": "what is that?"})
    in_thread(rank._listen)
    thread, raised = in_thread(lambda: rank.table(1.0))
    thread.join(5.0)
    assert [type(error) for error in raised] == [KeyError]


@pytest.mark.parametrize("text", [{"hand": ["too", "many", *range(20)]}, "no text"])
def test_rank_0_raises_what_goes_wrong_while_it_hears_others(text, meeting):
    head = head_with()
    gate = Gate(head, meeting, "a secret", {}, [None], None)
    head.generation = 1
    gate._listen(PeerJoined(1, 1, Wire({"name": "worker 1", "has_own_gpu": False}, text), 1))
    thread, raised = in_thread(lambda: head.table(1.0))
    thread.join(5.0)
    assert [type(error) for error in raised] == [MembershipChanged]
    with pytest.raises((TypeError, AssertionError)):
        head.form(lambda events: {}, 1.0)
    gate.close()


def test_rank_0_that_cannot_open_leaves_nothing_behind(monkeypatch):
    class NoGate:
        def __init__(self, *_):
            raise RuntimeError("no thread to be had")

    monkeypatch.setattr(head_module, "Gate", NoGate)
    monkeypatch.setattr(head_module, "call", lambda cluster: None)
    before = what_is_open()
    head = head_with(ranks=SimpleNamespace(token="a secret"))
    with pytest.raises(RuntimeError, match="no thread"):
        head.open()
    head.close({})
    assert what_is_open() == before


class Odd(nn.Linear):
    """Counts in numbers that gloo cannot sum."""

    def __init__(self):
        super().__init__(5, 3)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int16))


def test_numbers_that_cannot_be_summed_are_refused_before_anything_runs():
    with (
        ranks(1, tiny_job(model=Odd), protocol="all_reduce", stop="updates=1") as job,
        pytest.raises(pl.UsageError, match=r"^count is of torch\.int16, .* int32"),
    ):
        job.serve()
