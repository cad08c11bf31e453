"""Ranks without a server that `paceline run` has started: their result, also after one of them was killed."""

import pytest
from safetensors.torch import load_file

import paceline as pl
import summed_script
from launched_commands import run_on_ranks
from paceline.core.records import RunResumed
from paceline.recording.run_folder import SavedRun
from paths import ROOT
from ranks import flat
from tiny_jobs import largest_relative_difference

SCRIPT = ROOT / "tests/support/ranks/summed_script.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.parametrize(("protocol", "draw"), [("bsp", 0), ("balanced(m=4)", 0), ("bsp", 13)])
def test_the_result_is_that_of_a_simulation_also_after_a_rank_was_killed(protocol, draw, tmp_path):
    folder = tmp_path / "run"
    said = run_on_ranks(3, SCRIPT, protocol, folder, draw, cwd=tmp_path)
    stop = f"updates={summed_script.UPDATES}"
    expected = pl.train(summed_script.job(), protocol="bsp", cluster=pl.Cluster(3), stop=stop, seed=1)
    ours, theirs = load_file(folder / "model.safetensors"), expected.model.state_dict()
    assert largest_relative_difference(flat({name: ours[name] for name in theirs}), flat(theirs)) < 1e-12
    resumed = [each.version for each in SavedRun(folder).history.of(RunResumed)]
    assert resumed == ([10] if draw else [])
    assert ("was killed by SIGKILL" in said) == bool(draw)
    assert pl.replay(folder).is_same
