"""Memory that a server shares with the workers of its host: what is not sent, and what is not shared."""

import gc
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import paceline as pl
import rank_threads
from paceline.core.records import MemoryShared
from paceline.engines.distributed.parameter_server import server_tensors, shard_server
from paceline.engines.distributed.parameter_server.host_memory import HostMemory, map_offered
from paceline.tensors.flat_buffers import FlatLayout
from ranks import flat
from selections import parametrize_few
from tiny_jobs import batch_norm_net, largest_relative_difference, tiny_job

UPDATES, EXACT = 12, 1e-12
MESSAGES_BYTES = 20_000  # of an update


def wide_net():
    return nn.Sequential(nn.Linear(5, 4000), nn.Linear(4000, 3)).double()


class Network(pl.callbacks.Callback):
    """Callback that keeps the counters, and the workers that share memory."""

    def on_start(self, run):
        self.counters = run.network
        self.sharers = []

    def on_record(self, record):
        if isinstance(record, MemoryShared):
            self.sharers.append(record.worker)


def trained(protocol="bsp", job=None, **torchrun):
    """Return the final parameters of rank 0, and its network."""
    network = Network()
    job = job or tiny_job(model=wide_net)
    settings = {"protocol": protocol, "stop": f"updates={UPDATES}", "callbacks": [network]}
    ends = rank_threads.run(3, job, torchrun, **settings)
    assert all(torch.equal(flat(end.parameters), flat(ends[0].parameters)) for end in ends)
    return flat(ends[0].parameters), network


@pytest.fixture
def mapped(monkeypatch):
    """Return a list to which each attempt of a worker to map the memory is added."""
    attempts = []

    def mapping(offer, layout):
        attempts.append(map_offered(offer, layout))
        return attempts[-1]

    monkeypatch.setattr(server_tensors, "map_offered", mapping)
    return attempts


def test_versions_and_gradients_are_not_sent(mapped):
    parameters, network = trained()
    nbytes = FlatLayout(wide_net()).nbytes
    assert len(mapped) == 2
    assert all(mapped)
    first = 2 * 2 * nbytes  # tasks may be sent before the workers have mapped the memory
    assert network.counters.received_bytes < UPDATES * MESSAGES_BYTES + first
    assert network.counters.sent_bytes < UPDATES * MESSAGES_BYTES + first + 3 * nbytes  # also the final parameters
    assert sorted(network.sharers) == [0, 1]
    sent, network = trained(share_memory=False)
    assert len(mapped) == 2, "none is offered"
    assert network.sharers == []
    assert torch.equal(parameters, sent)


def test_a_worker_that_cannot_map_it_is_sent_them(mapped, monkeypatch):
    expected, _ = trained()
    mapping, can_map = server_tensors.map_offered, iter([True, False])
    monkeypatch.setattr(server_tensors, "map_offered", lambda *offer: mapping(*offer) if next(can_map) else None)
    parameters, network = trained()
    assert next(can_map, None) is None
    assert len(mapped) == 2 + 1
    assert len(network.sharers) == 1
    assert torch.equal(parameters, expected)


@parametrize_few(
    ("protocol", "job"),
    [
        ("k_sync(k=1)", {}),
        ("asp", {}),
        ("k_batch_async(k=2)", {}),
        ("balanced(m=4)", {}),
        ("bsp + local_steps(H=3)", {}),
        ("bsp", {"model": batch_norm_net, "clip_norm": 0.1}),
    ],
    keep=2,
)
def test_protocols_run_with_it(protocol, job, mapped):
    trained(protocol, tiny_job(**job))
    assert all(mapped)


def test_the_parameters_are_those_of_a_simulation(mapped):
    job = tiny_job(model=batch_norm_net, clip_norm=0.1)
    parameters, _ = trained(job=job)
    simulated = pl.train(job, protocol="bsp", cluster=pl.Cluster(2), stop=f"updates={UPDATES}", seed=1)
    assert largest_relative_difference(parameters, flat(simulated.model.state_dict())) < EXACT
    assert all(mapped)


@pytest.mark.parametrize("torchrun", [{"wire": "bf16"}, {"debug": True}], ids=str)
def test_it_is_not_shared_where_that_would_change_something(torchrun, mapped):
    trained(job=tiny_job(), **torchrun)
    assert mapped == []


@pytest.mark.parametrize("shards", [2, 3])
def test_the_servers_of_all_shards_share_it(shards, mapped):
    expected, _ = trained()
    parameters, network = trained(shards=shards)
    assert len(mapped) == 2 * 2
    assert all(mapped)
    assert largest_relative_difference(parameters, expected) < EXACT
    nbytes = FlatLayout(wide_net()).nbytes
    assert network.counters.received_bytes < UPDATES * MESSAGES_BYTES + 3 * nbytes  # first tasks, and the final shards
    sent, _ = trained(shards=shards, share_memory=False)
    assert torch.equal(parameters, sent)


@pytest.mark.parametrize("protocol", ["asp + dc_asgd(lambda0=0.1)", "k_batch_async(k=2)", "bsp + local_steps(H=3)"])
def test_protocols_run_with_it_and_shards(protocol, mapped):
    trained(protocol, shards=2)
    assert all(mapped)


def test_a_shard_whose_server_cannot_map_it_is_sent(mapped, monkeypatch):
    expected, _ = trained(shards=2)
    mapped.clear()
    monkeypatch.setattr(shard_server.OfferedShard, "__init__", refuse)
    parameters, _ = trained(shards=2)
    assert mapped == [], "no worker is offered memory of which a shard is not a part"
    assert torch.equal(parameters, expected)


def refuse(*arguments):
    raise OSError("another host")


def test_versions_without_room_in_it_are_sent(mapped, monkeypatch):
    expected, _ = trained()
    numbers = count()
    monkeypatch.setattr(HostMemory, "allocate", lambda memory: allocated(memory, next(numbers)))
    parameters, network = trained()
    assert all(mapped)
    assert torch.equal(parameters, expected)
    assert network.counters.sent_bytes > UPDATES / 2 * FlatLayout(wide_net()).nbytes, "some were sent"


def allocated(memory, number):
    """Return storage for a version, which is shared if its number is odd."""
    return memory._versions.vectors(number) if number % 2 else memory._layout.allocate()


LAYOUT = FlatLayout(wide_net())


@pytest.fixture
def memory():
    memory = HostMemory(LAYOUT, slots=4)
    yield memory
    memory.close()


def test_both_sides_see_what_the_other_writes(memory):
    offered = map_offered(memory.offer(7), LAYOUT)
    memory.mapped(7)
    gradient, version = memory.gradient(7), memory.allocate()
    offered.gradient.memory.fill_(3)
    assert gradient.memory.eq(3).all()
    version.memory.fill_(5)
    assert offered.version(version.slot).memory.eq(5).all()


@pytest.mark.parametrize(
    ("file", "wrong"),
    [
        ("versions", {"key": b"x" * 16}),
        ("gradient", {"key": b""}),
        ("versions", {"process": 2**22 + 1}),
        ("gradient", {"descriptor": 1}),
    ],
)
def test_memory_of_another_host_is_not_mapped(memory, file, wrong):
    offer = memory.offer(7)
    assert map_offered(offer, LAYOUT)
    assert map_offered(msgspec.structs.replace(offer, **{file: getattr(offer, file)._replace(**wrong)}), LAYOUT) is None


def test_memory_of_another_size_is_not_mapped(memory):
    assert map_offered(msgspec.structs.replace(memory.offer(7), slots=3), LAYOUT) is None


def test_no_file_is_left_after_many_losses():
    def files():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("paceline")

    before = files()
    memory = HostMemory(LAYOUT, slots=4)
    for loss in range(50):
        map_offered(memory.offer(loss), LAYOUT)
        if loss % 2:
            memory.mapped(loss)
        memory.forget(loss)
    memory.close()
    del memory
    assert files() == before


def test_a_process_that_maps_what_it_was_not_offered_is_refused(memory):
    memory.offer(7)
    memory.mapped(7)
    with pytest.raises(ValueError, match="not offered"):
        memory.mapped(7)
    with pytest.raises(ValueError, match="not offered"):
        memory.mapped(8)


def test_each_process_has_memory_of_its_own(memory):
    """One that was given up, and writes on, does not reach the next one with its number."""
    earlier = map_offered(memory.offer(7), LAYOUT)
    memory.mapped(7)
    memory.forget(7)
    map_offered(memory.offer(8), LAYOUT)
    memory.mapped(8)
    earlier.gradient.memory.fill_(3)
    assert not memory.gradient(8).memory.any()


@pytest.mark.processes
def test_another_process_opens_it_by_the_descriptor(memory):
    offer = memory.offer(7)
    program = (
        "import sys; from paceline.engines.distributed.parameter_server.host_memory import map_offered\n"
        "from paceline.engines.distributed.transport.memory_messages import MemoryOffered, SharedFile\n"
        "from paceline.tensors.flat_buffers import FlatLayout; from torch import nn\n"
        "layout = FlatLayout(nn.Sequential(nn.Linear(5, 4000), nn.Linear(4000, 3)).double())\n"
        f"map_offered({offer!r}, layout).gradient.memory.fill_(3)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    memory.mapped(7)
    assert memory.gradient(7).memory.eq(3).all()
