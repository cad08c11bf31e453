"""Collectives of which the sizes are compared between the ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paceline.shares.collectives import patch_collectives


class Counting:
    """Balancer of one rank that notes which collectives are compared."""

    ranks = 1

    def __init__(self):
        self.compared = []
        self.stopwatch = SimpleNamespace(is_running=False)

    def check_sizes(self, name, sizes):
        self.compared.append((name, sizes))


@pytest.fixture
def balancer(tmp_path, monkeypatch):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    found = Counting()

    def replace(owner, name, patched):
        if hasattr(owner, name):
            monkeypatch.setattr(owner, name, patched(getattr(owner, name)))

    patch_collectives(lambda: found, replace)
    yield found
    dist.destroy_process_group()


def test_tensors_of_a_script_are_compared(balancer):
    dist.all_gather([torch.empty(3)], torch.ones(3))
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(()))
    assert balancer.compared == [("all_gather", [3]), ("all_reduce", [2])]


@pytest.mark.parametrize("module", ["torch.distributed.fsdp._fully_shard.x", "torch.distributed._composable.fsdp.x"])
def test_parameters_that_fsdp_gathers_are_not_compared(balancer, module):
    names = {"__name__": module, "dist": dist, "torch": torch}
    exec("dist.all_gather([torch.empty(3)], torch.ones(3))", names)
    assert balancer.compared == []


def test_a_script_may_tell_how_many_values_go_to_each_rank(balancer):
    dist.all_to_all_single(torch.empty(3), torch.ones(3), [3], [3])
    dist.all_to_all_single(torch.empty(3), torch.ones(3), output_split_sizes=[3], input_split_sizes=[3])
    assert balancer.compared == []
    dist.all_to_all_single(torch.empty(3), torch.ones(3))
    assert balancer.compared == [("all_to_all_single", [3])]
