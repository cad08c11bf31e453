"""Forming a group: what goes wrong beside the vectors."""

from contextlib import closing

import pytest
import torch
from torch import nn

import paceline as pl
from group_members import LostGroup, Wire, peer, rank, server_with
from paceline.engines.distributed.allreduce import membership as membership_module
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup, MembershipChanged
from paceline.engines.distributed.allreduce.member import MembershipClient
from paceline.engines.distributed.rendezvous.acceptor import Acceptor
from paceline.engines.distributed.rendezvous.session import ClientSession, failed_end
from paceline.engines.distributed.transport.messages import Hello, Leave
from paceline.engines.distributed.transport.sum_messages import FormGroup, GroupBroken, StepReport
from ranks import ranks
from sum_groups import transport
from this_process import in_thread, what_is_open
from tiny_jobs import tiny_job

LATE_S = 0.9
SIZE = 1_000_000  # numbers


class Formed(Exception):  # noqa: N818  # which ends a test
    """A group was announced to all members."""


@pytest.fixture
def stops_when_formed(monkeypatch):
    def connect(*_):
        raise Formed

    monkeypatch.setattr(ElasticGroup, "connect", connect)
    monkeypatch.setattr(membership_module, "GRACE_S", 0.05)


def test_a_rank_that_leaves_while_a_group_is_announced_does_not_disturb_the_others(stops_when_formed):
    wires = [Wire(), Wire()]
    members = [peer(worker, wire, f"worker {worker}") for worker, wire in enumerate(wires, start=1)]
    server = server_with(*members)
    send = wires[0].send

    def send_while_the_other_one_leaves(message):
        thread, _ = in_thread(lambda: server.on_leave(members[1], "gone"))
        thread.join(0.1)
        send(message)

    wires[0].send = send_while_the_other_one_leaves
    with pytest.raises(Formed):
        server.form(lambda events: {}, 1.0)
    assert [wire.sent[0].rank for wire in wires] == [1, 2]


@pytest.mark.parametrize(("theirs", "uses_nccl"), [(["B", "C"], True), (["B", "B"], False), (["B", ""], False)])
@pytest.mark.parametrize("ours", ["A", "B", ""])
def test_nccl_sums_if_every_process_has_its_own_gpu_and_each_group_has_another_key(
    theirs, uses_nccl, ours, stops_when_formed, monkeypatch
):
    monkeypatch.setattr(membership_module, "gpu_of", lambda device: ours)
    wires = [Wire(), Wire()]
    members = [peer(worker, wires[worker - 1], gpu=theirs[worker - 1]) for worker in (1, 2)]
    server = server_with(*members, is_elastic=True)
    for _ in range(2):
        with pytest.raises(Formed):
            server.form(lambda events: {}, 1.0)
    sent = [form for wire in wires for form in wire.sent]
    assert {form.uses_nccl for form in sent} == {uses_nccl and ours == "A"}
    assert {len(form.key) for form in sent} == {64}
    assert len({form.key for form in sent}) == 2


def test_the_error_names_why_a_group_has_broken(stops_when_formed):
    member = peer(1, Wire(), "worker 1 (here)")
    server = server_with(member)
    with pytest.raises(Formed):
        server.form(lambda events: {}, 1.0)
    server.on_message(member, GroupBroken(1, "no such numbers", False))
    with pytest.raises(pl.RunError, match=r"worker 1 \(here\) .* \(worker 1: no such numbers\)"):
        server.form(lambda events: {}, 1.0)


def client_on(wire):
    client = MembershipClient(rank(), {})
    client._session = ClientSession(wire)
    client._session.listen(client._on_message, client._on_error)
    return client


def test_a_sum_that_cannot_be_started_breaks_the_group():
    server = server_with()
    server.group = LostGroup()
    with pytest.raises(MembershipChanged, match="cut off"):
        server.begin_sum(None)
    wire = Wire(FormGroup(generation=2, key="a secret", rank=1, size=2, uses_nccl=False))
    client = client_on(wire)
    client.group = LostGroup()
    with pytest.raises(MembershipChanged):
        client.begin_sum(None)
    assert wire.sent == [GroupBroken(0, "cut off", False)]


def fail(*_):
    raise TypeError("unexpected")


def test_an_error_in_a_callback_is_raised_in_the_main_thread(monkeypatch):
    monkeypatch.setattr(MembershipClient, "_announce", fail)
    with pytest.raises(TypeError, match="unexpected"):
        client_on(Wire(FormGroup(generation=2, key="a secret", rank=1, size=2, uses_nccl=False))).summary(1.0)


@pytest.mark.parametrize("message", [StepReport(generation=1), Leave("SIGTERM")])
def test_an_error_in_a_callback_of_the_acceptor_ends_the_run(message, monkeypatch):
    server = server_with()
    server.generation = 1
    with closing(transport()) as ours, closing(Acceptor(ours, "", 0, {}, 2, server)) as acceptor:
        session = ClientSession.connect(ours, acceptor.address, Hello.of("worker 1", 1, {}))
        monkeypatch.setattr(server, "on_message", fail)
        session.connection.send(message)
        with pytest.raises(MembershipChanged):
            server.summary(5.0)
        with pytest.raises(TypeError, match="unexpected"):
            server.form(lambda events: {}, 1.0)


def test_rank_0_that_cannot_open_leaves_nothing_behind(monkeypatch):
    def no_acceptor(*_):
        raise RuntimeError("no thread to be had")

    monkeypatch.setattr(membership_module, "listen_as_rank_0", no_acceptor)
    before = what_is_open()
    server = server_with()
    with pytest.raises(RuntimeError, match="no thread"):
        server.open()
    server.close(failed_end(RuntimeError()))
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
