"""Storage of versions: who may be written to, and when."""

import torch
from torch import nn

from paceline.tensors.flat_buffers import FlatLayout
from paceline.tensors.version_store import VersionStore

LAYOUT = FlatLayout(nn.Linear(3, 2))


def store():
    return VersionStore(LAYOUT.allocate)


def test_a_version_without_a_reader_is_updated_in_place():
    versions = store()
    first = versions.publish(0)
    assert not versions.is_newest_read
    assert versions.publish(1) is first
    assert list(versions.state_dict()["stored"]) == [1]


def test_a_version_stays_until_its_last_reader_has_released_it():
    versions = store()
    read = versions.publish(0)
    for _ in range(2):
        versions.acquire(0)
    assert versions.is_newest_read
    second = versions.publish(1)
    assert second is not read
    versions.release(0)
    assert versions[0] is read
    versions.release(0)
    versions.acquire(1)
    assert versions.publish(2) is read  # free again


def test_a_loaded_state_leaves_the_storage_of_a_server_alone():
    saved, versions = store(), store()
    saved.publish(7).memory.fill_(7)
    saved.acquire(7)
    saved.publish(8).memory.fill_(8)
    of_the_server = versions.publish(3)
    of_the_server.memory.fill_(3)
    versions.load_state_dict(saved.state_dict())
    assert {version: int(versions[version].memory[0]) for version in (7, 8)} == {7: 7, 8: 8}
    free = [versions.free_storage() for _ in range(3)]
    assert all(each is not of_the_server for each in [versions[7], versions[8], *free])
    assert torch.equal(of_the_server.memory, torch.full_like(of_the_server.memory, 3))


def test_the_callback_gets_each_version_that_has_no_reader_any_more():
    released = []
    versions = VersionStore(LAYOUT.allocate, released.append)
    versions.publish(0)
    versions.acquire(0)
    versions.publish(1)
    assert released == []
    versions.release(0)
    assert released == [0]
    versions.publish(2)
    assert released == [0, 1]
