"""Launcher of another host than that of rank 0, as a client of the store in which the ranks meet."""

import time
from math import inf

import pytest

from machine_speed import scaled
from paceline.clusters.launch_env import SURVIVES
from paceline.clusters.launch_settings import LaunchSettings
from paceline.launcher.launch_store import LaunchStore
from paceline.launcher.run_facts import RunFacts
from paceline.launcher.store_client import StoreClient
from ranks import free_port


@pytest.fixture
def settings():
    """Return the settings of two hosts with two ranks each."""
    port = free_port()
    return [
        LaunchSettings(
            nproc_per_node=2,
            nnodes=2,
            node_rank=node,
            master="127.0.0.1",
            port=port,
            max_restarts=-1,
            token="a token of four ranks",
        )
        for node in range(2)
    ]


def test_a_host_sends_heartbeats_and_tells_the_losses_of_its_ranks(settings):
    with LaunchStore(settings[0]) as store, StoreClient(settings[1]) as client:
        store.begin()
        facts, deadline_s = RunFacts(store.client(), 4), time.monotonic() + scaled(20)
        while facts.heartbeats([1]) == {1: 0}:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        store.client().set(SURVIVES, "1")
        theirs = RunFacts(client.client(), 4)
        assert [theirs.tell_loss(3), theirs.tell_loss(3)] == [True, False]
        assert facts.survivors() == theirs.survivors() == (0, 1, 2)


def test_of_a_store_that_is_not_reached_nothing_is_known(settings):
    assert StoreClient(settings[1]).client() is None
    facts = RunFacts(None, 4)
    assert (facts.holds(SURVIVES), facts.survivors(), facts.silence_s(), facts.tell_loss(3)) == (False, (), inf, False)
