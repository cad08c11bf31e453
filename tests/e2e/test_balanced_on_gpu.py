"""Unequal shares, and losses of ranks, on a GPU that all ranks share."""

import pytest
from test_survived_losses import check, check_changed

from balance_catalogue import LOOPS
from balanced_ranks import printed_by
from gpu import DEVICE, on_gpu

pytestmark = on_gpu
# Gloo does not gather shards on a GPU, processes of a loader cannot use it, and Triton compiles for minutes.
LEFT_OUT = ("fsdp2", "hsdp", "compiled", "processes")


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("DEVICE", DEVICE)


def test_the_parameters_of_every_loop_are_those_of_equal_shares():
    loops = [name for name in LOOPS if not any(each in name for each in LEFT_OUT)]
    found = {each["loop"]: each for each in printed_by("balance_ranks.py", loops, 2)}
    assert list(found) == loops
    assert [each for each in found.values() if each["changes"] < 1] == []
    assert [each for each in found.values() if max(each["parameters"], each["steps"]) > 1e-12] == []


def test_a_rank_is_lost_and_comes_back(tmp_path):
    check(tmp_path, 3, ["1:6:sum"], RETURNS_AT="40", EPOCHS="8")


def test_ranks_are_lost_with_shares_that_change(tmp_path):
    assert check(tmp_path, 2, ["1:8:forward"], CHANGING="1") == 1
    check_changed(tmp_path)


def test_a_batch_that_runs_out_of_memory_in_backward_is_dealt_again(tmp_path):
    assert check(tmp_path, 2, [], MEMORY="5", EPOCHS="3") == 1
