"""`paceline run --on-death restart` with ranks of an unchanged DDP script, of which one is killed."""

import re

import pytest

import restarting_ddp
from launched_commands import run_on_ranks


def run(folder, ranks, lost, update):
    """Run the script, and return what it has printed."""
    folder.mkdir()
    return run_on_ranks(ranks, restarting_ddp.__file__, lost, update, cwd=folder, options=["--on-death", "restart"])


def check(folder, ranks, lost, update):
    printed = run(folder / "lost", ranks, lost, update)
    lives = re.findall(r"rank (\d+) in life (\d+), from update (\d+)", printed)
    assert sorted(lives) == [(str(rank), "1", str(update)) for rank in range(ranks)]
    assert (
        printed.count(f"rank {lost} was killed by SIGKILL: all ranks of this host are started again in 1 s, from ") == 1
    )
    return re.search("sum (.*)", printed)[1]


@pytest.mark.slow
def test_all_ranks_go_on_from_the_script_s_checkpoint(tmp_path):
    check(tmp_path, 2, 1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 3])
def test_the_parameters_are_those_of_a_run_without_a_loss(lost, tmp_path):
    whole = re.search("sum (.*)", run(tmp_path / "whole", 4, -1, 0))[1]
    assert check(tmp_path, 4, lost, 5) == whole
