"""Training loops under unequal shares: their parameters are those of equal shares."""

import json

import pytest

from balance_loops import LOOPS
from paths import SUPPORT
from torchrun import torchrun

FIRST = ("plain_loop", "accumulation_with_clipping", "gan", "tokens", "batches_taken_ahead", "fsdp2")


def results(folder, loops, ranks):
    done = torchrun(folder, "--nproc-per-node", str(ranks), str(SUPPORT / "balance_ranks.py"), *loops)
    assert done.returncode == 0, done.stderr
    return {each["loop"]: each for each in map(json.loads, done.stdout.splitlines())}


def check(found, loops):
    assert list(found) == list(loops)
    assert {name: each for name, each in found.items() if each["changes"] < 1 or each["distance"] > 1e-12} == {}


@pytest.mark.processes
def test_the_parameters_are_those_of_equal_shares(tmp_path):
    check(results(tmp_path, FIRST, 2), FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_parameters_of_every_loop_are_those_of_equal_shares(ranks, tmp_path):
    check(results(tmp_path, LOOPS, ranks), LOOPS)
