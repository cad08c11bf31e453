"""Check that ranks keep the same parameters."""

from math import isnan, nan

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import UsageError
from paceline.shares.same_parameters import LOOK_EVERY, SameParameters


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def model(value=0.0):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    with torch.no_grad():
        for each in layers.parameters():
            each += value
    return DistributedDataParallel(layers)


def same(value=0.0, *, is_host=True):
    return SameParameters(model(value), is_host=is_host)


def test_equal_parameters_have_the_same_checksum():
    assert same().checksum() == same().checksum() != same(1e-6).checksum()


def test_ranks_that_part_after_batches_of_unequal_sizes_are_refused():
    looked = same()
    checksum = looked.checksum()
    looked.check([checksum, checksum, nan], has_changed=True)
    with pytest.raises(UsageError, match="the parameters of the ranks are not the same"):
        looked.check([checksum, checksum + 1], has_changed=True)


def test_ranks_that_part_by_themselves_are_left_alone():
    looked = same()
    looked.check([1.0, 2.0], has_changed=False)
    assert isnan(looked.checksum())


def test_a_sharded_model_is_not_looked_at():
    assert isnan(SameParameters(nn.Linear(3, 3), is_host=True).checksum())


def test_parameters_on_a_device_are_looked_at_seldom():
    looked = same(is_host=False)
    seen = [number for number in range(1, 2 * LOOK_EVERY + 1) if not isnan(looked.checksum())]
    assert seen == [LOOK_EVERY, 2 * LOOK_EVERY]
