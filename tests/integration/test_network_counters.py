"""Counts of rank 0: the bytes of a run, and the connections that it rejects, as callbacks get them."""

import pytest
from torch import nn

import paceline as pl
import rank_threads
from paceline.tensors.flat_buffers import FlatLayout
from tiny_jobs import tiny_job


def wide_net():
    return nn.Sequential(nn.Linear(5, 4000), nn.Linear(4000, 3)).double()


class Network(pl.callbacks.Callback):
    """Callback that keeps the counters."""

    def on_start(self, run):
        self.counters = run.network


def run(protocol):
    network = Network()
    settings = {"protocol": protocol, "stop": "updates=20", "callbacks": [network]}
    rank_0, *_ = rank_threads.run(3, tiny_job(model=wide_net), {"share_memory": False}, **settings)
    return network.counters, pl.results.History(lambda: rank_0.records).totals


def test_rank_0_counts_the_bytes_of_versions_and_gradients():
    counters, totals = run("bsp")
    nbytes = FlatLayout(wide_net()).nbytes
    expected_bytes = totals.used * nbytes
    assert totals.used == 20 * 2  # rank 0 is the server
    assert 0 <= counters.received_bytes - expected_bytes < nbytes
    assert 0 <= counters.sent_bytes - expected_bytes < 4 * nbytes  # also the final parameters
    assert sum(counters.rejected.values()) == 0


@pytest.mark.slow
def test_without_a_server_rank_0_counts_its_messages():
    counters, _ = run("all_reduce")
    assert counters.received_bytes
    assert counters.sent_bytes


def test_a_simulated_run_exchanges_nothing():
    network = Network()
    pl.train(tiny_job(), protocol="bsp", cluster=pl.Cluster(2), stop="updates=1", callbacks=[network])
    assert (network.counters.sent_bytes, network.counters.received_bytes) == (0, 0)
