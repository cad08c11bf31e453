"""Store of a group for sums: keys of other members, those that come late, and an end of the waiting."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from machine_speed import scaled
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.gloo import dist
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.sum_messages import StoreKey
from sum_groups import HOST, stores, transport
from this_process import in_thread, wait_until

SOON = timedelta(seconds=scaled(5))


@pytest.fixture
def alone():
    """Return the store of a process whose keys reach no other one, and what it has sent."""
    sent = []
    return GroupStore(3, sent.append), sent


def test_a_key_is_sent_to_the_others_and_those_of_others_are_found(alone):
    store, sent = alone
    store.set("ours", b"1")
    assert sent == [StoreKey(3, "ours", b"1")]
    assert not store.check(["ours", "theirs"])
    store.put(StoreKey(3, "theirs", b"2"))
    assert store.check(["ours", "theirs"])
    store.wait(["ours", "theirs"], SOON)
    assert (store.get("ours"), store.get("theirs")) == (b"1", b"2")
    assert len(sent) == 1  # what arrives is not sent once more


def test_a_key_of_another_group_is_dropped(alone):
    store, _ = alone
    store.put(StoreKey(2, "late", b"of the group before"))
    assert not store.check(["late"])


@pytest.mark.parametrize("act", [lambda s: s.get("late"), lambda s: s.wait(["late"], SOON)], ids=["get", "wait"])
def test_a_key_that_comes_late_ends_the_wait(alone, act):
    store, _ = alone
    thread, raised = in_thread(lambda: act(store))
    thread.join(0.05)
    assert thread.is_alive()
    store.put(StoreKey(3, "late", b"here"))
    thread.join(SOON.total_seconds())
    assert not thread.is_alive()
    assert raised == []


def test_a_key_that_does_not_come_is_an_error_and_named(alone):
    store, _ = alone
    store.put(StoreKey(3, "a", b""))
    with pytest.raises(RuntimeError, match=r"did not connect within 0\.01 s"):
        store.wait(["a", "b"], timedelta(seconds=0.01))
    assert store.await_keys(["a", "b"], 0.01) == ["b"]


@pytest.mark.parametrize("late", [False, True])
def test_an_abort_ends_every_wait_in_gloo_too(alone, late):
    store, _ = alone
    connecting = transport()

    def connect():
        connecting.group(store, 0, 2, HOST, timeout_s=60.0)

    if late:
        store.abort()
    thread, raised = in_thread(connect)
    if not late:
        wait_until(lambda: store.check(["0/0"]))  # gloo has begun
        store.abort()
    thread.join(SOON.total_seconds())
    assert [(type(error), str(error)) for error in raised] == [(ConnectionLost, "the group was aborted")]


def sums(groups):
    """Return the sums over groups whose members begin in threads."""

    def act(group):
        numbers = torch.ones(3)
        group.allreduce([numbers], dist.AllreduceOptions()).wait()
        return numbers.tolist()

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(act, groups))


def test_two_groups_of_one_process_form_at_the_same_time():
    sizes = {1: 2, 2: 3}
    members = [(store, rank, size) for number, size in sizes.items() for rank, store in enumerate(stores(size, number))]
    connecting = transport()
    with ThreadPoolExecutor(len(members)) as pool:
        groups = list(pool.map(lambda member: connecting.group(*member, HOST), members))
    assert sums(groups) == [[2.0] * 3] * 2 + [[3.0] * 3] * 3
    connecting.close()


def test_keys_under_two_prefixes_of_a_store_do_not_meet():
    ours, theirs = stores(2)
    dist.PrefixStore("check 1", ours).set("ready", "a")
    dist.PrefixStore("check 2", theirs).set("ready", "b")
    assert dist.PrefixStore("check 1", theirs).get("ready") == b"a"
    assert dist.PrefixStore("check 2", ours).get("ready") == b"b"
