"""Ranks without a server that `paceline run` has started: their result, and a run that goes on without a killed one."""

import pytest
from safetensors.torch import load_file

import paceline as pl
import summed_script
from launched_commands import run_on_ranks
from paceline.core.records import RunResumed, UpdateMade, WorkerJoined, WorkerLost
from paceline.recording.run_folder import SavedRun
from paths import ROOT
from ranks import flat
from tiny_jobs import largest_relative_difference

SCRIPT = ROOT / "tests/support/ranks/summed_script.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.parametrize("protocol", ["bsp", "balanced(m=4)"])
def test_the_result_is_that_of_a_simulation(protocol, tmp_path):
    folder = tmp_path / "run"
    run_on_ranks(3, SCRIPT, protocol, folder, summed_script.NOBODY, 0, cwd=tmp_path)
    stop = f"updates={summed_script.UPDATES}"
    expected = pl.train(summed_script.job(), protocol="bsp", cluster=pl.Cluster(3), stop=stop, seed=1)
    ours, theirs = load_file(folder / "model.safetensors"), expected.model.state_dict()
    assert largest_relative_difference(flat({name: ours[name] for name in theirs}), flat(theirs)) < 1e-12
    assert pl.replay(folder).is_same


@pytest.mark.parametrize("protocol", ["bsp", "pull(k=8)"])
def test_the_others_go_on_without_a_killed_rank(protocol, tmp_path):
    folder = tmp_path / "run"
    said = run_on_ranks(3, SCRIPT, protocol, folder, 1, 13, cwd=tmp_path)
    history = SavedRun(folder).history
    assert "was killed by SIGKILL" in said
    assert [each.worker for each in history.of(WorkerLost)] == [1]
    assert not history.of(RunResumed)
    assert history.of(UpdateMade)[-1].version == summed_script.UPDATES
    assert pl.replay(folder).is_same


def test_the_worker_beside_rank_0_comes_back(tmp_path):
    folder = tmp_path / "run"
    said = run_on_ranks(3, SCRIPT, "bsp", folder, summed_script.BESIDE, 13, cwd=tmp_path)
    history = SavedRun(folder).history
    assert "worker 0, beside rank 0, is started again in 1 s" in said
    assert [each.worker for each in history.of(WorkerLost)] == [0]
    assert [each.worker for each in history.of(WorkerJoined)] == [0]
    assert not history.of(RunResumed)
    assert pl.replay(folder).is_same
