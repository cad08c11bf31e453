"""A sum that takes long: which members are idle, and whether all of them still reach each other."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

import paceline as pl
from group_members import Wire, peer, server_with
from machine_speed import scaled
from paceline.engines.distributed.allreduce import membership as membership_module
from paceline.engines.distributed.allreduce import progress_monitor as monitor_module
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup, MembershipChanged
from paceline.engines.distributed.allreduce.member import AnnouncedGroup, MembershipClient
from paceline.engines.distributed.allreduce.progress_monitor import ProgressMonitor, waits_s
from paceline.engines.distributed.rendezvous.session import ClientSession
from paceline.engines.distributed.transport.sum_messages import (
    CheckLinks,
    GroupBroken,
    Progress,
    ProgressRequest,
    StoreKey,
)
from sum_groups import HOST, stores, transport
from this_process import in_thread, wait_until

SECOND_CHECK = "check 2/0/"  # begins the keys of gloo in it


def test_a_link_that_is_cut_is_noticed_by_the_next_check():
    of_members = stores(3, is_relayed=lambda key: not key.startswith(SECOND_CHECK))
    groups = [ElasticGroup("a secret", rank, 3, store) for rank, store in enumerate(of_members)]
    with closing(transport(1.0)) as connecting, ThreadPoolExecutor(3) as pool:
        for number, said in ((1, ""), (2, "a process of the group did not connect within 0.2 s")):
            assert list(pool.map(lambda group, n=number: group.check_links(connecting, HOST, n), groups)) == [said] * 3


def test_a_member_that_does_not_begin_the_check_proves_nothing_and_neither_does_an_abort():
    ours, _ = stores(2)
    group = ElasticGroup("a secret", 0, 2, ours)
    with closing(transport(0.05)) as connecting:
        assert not group.check_links(connecting, HOST, 1)
        group.abort()
        assert not group.check_links(connecting, HOST, 2)


@pytest.fixture
def stalled():
    """Return rank 0 while its sum does not continue, its member, and what ends the wait of rank 0."""
    wire = Wire()
    server = server_with(peer(1, wire, "worker 1 (here)"), peer(2, Wire(), "worker 2 (there)"), heartbeat_timeout_s=0.1)
    for worker in list(server._joining):
        server._members[worker] = server._joining.pop(worker)
    server.generation = 1
    server.group = ElasticGroup("a secret", 0, 3, stores(3)[0])
    return server, wire, in_thread(lambda: server.summary(60.0))


def sent(wire, kind):
    return [message for message in wire.sent if isinstance(message, kind)]


def test_members_that_do_not_reach_each_other_end_the_run_though_rank_0_reaches_both(stalled, monkeypatch):
    server, wire, (thread, raised) = stalled
    wait_until(lambda: sent(wire, CheckLinks))
    assert sent(wire, CheckLinks)[0] == CheckLinks(1, 1)
    for member in list(server._members.values()):
        server.on_message(member, GroupBroken(1, "no route", True))
    thread.join(scaled(5.0))
    assert [type(error) for error in raised] == [MembershipChanged]
    monkeypatch.setattr(membership_module, "GRACE_S", 0.05)
    with pytest.raises(pl.RunError, match=r"worker 1 \(here\) and worker 2 \(there\) do not reach each other"):
        server.form(lambda events: {}, 1.0)


def test_links_are_checked_again_as_long_as_nothing_is_found(stalled):
    server, wire, (thread, raised) = stalled
    wait_until(lambda: len(sent(wire, CheckLinks)) >= 3)
    assert [check.number for check in sent(wire, CheckLinks)][:3] == [1, 2, 3]
    server.fail(pl.RunError("enough"))
    thread.join(scaled(5.0))
    assert [str(error) for error in raised] == ["enough"]


@pytest.mark.parametrize("generation", [1, 2])
def test_a_member_reports_what_it_does_not_reach_in_the_group_of_the_check(generation):
    ours, _ = stores(2, is_relayed=lambda key: False)
    ours.put(StoreKey(1, "check 1/1", b""))  # the other member has begun
    wire = Wire()
    client = MembershipClient(server_with(heartbeat_timeout_s=0.2)._rank, {})
    client._session = ClientSession(wire)
    client._newest = AnnouncedGroup(1, ElasticGroup("a secret", 0, 2, ours), ours)
    client._on_message(CheckLinks(generation, 1))
    if generation == 1:
        wait_until(lambda: sent(wire, GroupBroken))
        [broken] = sent(wire, GroupBroken)
        assert (broken.generation, broken.is_unreachable) == (1, True)
    else:
        time.sleep(0.1)
        assert wire.sent == []


# --- keys of the store ----------------------------------------------------------------------------------------


def test_rank_0_relays_keys_of_members_of_this_group_only():
    wires = [Wire(), Wire()]
    members = [peer(worker, wire) for worker, wire in enumerate(wires, start=1)]
    server = server_with(*members, is_elastic=True)
    thread, raised = in_thread(lambda: server.form(lambda events: {}, 60.0))
    wait_until(lambda: wires[1].sent and server.group is not None and server._store.check(["ready/0"]))
    server.on_message(members[0], StoreKey(1, "good", b"1"))
    server.on_message(members[0], StoreKey(2, "of another group", b"1"))
    server.on_join(peer(3, Wire()))
    server.on_message(peer(3, Wire()), StoreKey(1, "of no member", b"1"))
    assert StoreKey(1, "good", b"1") in wires[1].sent
    assert StoreKey(1, "good", b"1") not in wires[0].sent  # who has sent it
    assert server._store.check(["good"])
    for key in ("of another group", "of no member"):
        assert not server._store.check([key])
        assert key not in [message.key for wire in wires for message in sent(wire, StoreKey)]
    server.fail(pl.RunError("enough"))
    thread.join(scaled(5.0))
    assert [str(error) for error in raised] == ["enough"]


# --- progress -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "idle"),
    [
        (Progress(4, 7, False), []),
        (Progress(4, 6, True), []),  # it waits for the network itself
        (Progress(4, 6, False), [2]),
        (Progress(3, 7, True), [2]),  # it has not come to this group yet
        (None, [2]),
    ],
)
def test_a_member_is_idle_if_it_is_behind_and_waits_for_no_sum(answer, idle, monkeypatch):
    monkeypatch.setattr(monitor_module, "ANSWER_S", 0.05)

    def send_all(request):
        assert request == ProgressRequest(4)
        monitor.on_progress(1, Progress(4, 8, False))
        if answer is not None:
            monitor.on_progress(2, answer)
        return {1, 2}

    monitor = ProgressMonitor(send_all)
    assert monitor.idle(generation=4, steps=7) == idle


def test_actions_are_carried_out_in_their_intervals():
    done = []
    waits = waits_s({lambda: done.append("often"): 0.02, lambda: done.append("rarely"): 0.5})
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + 0.2:
        time.sleep(next(waits))
    assert set(done) == {"often"}
    assert 3 <= len(done) <= 10
