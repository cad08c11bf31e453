"""Optimizers, callbacks and parts of a protocol that are of the user's main module, in the process of the server."""

from pathlib import Path

import pytest

import own_code_script
from launched_commands import run_on_ranks
from paceline.core.records import GradientArrived
from paceline.recording.run_folder import SavedRun


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "cluster"),
    [("bsp", "torchrun(server=true)"), ("bsp", "torchrun()"), ("own", "torchrun()")],
    ids=["server", "no server", "own compensator"],
)
def test_they_travel_by_value(protocol, cluster, tmp_path):
    notes = tmp_path / "notes"
    done = run_on_ranks(2, Path(own_code_script.__file__), protocol, cluster, notes, cwd=tmp_path)
    answers = dict(line.partition("ANSWER ")[2].split(maxsplit=1) for line in done.splitlines() if "ANSWER" in line)
    assert sorted(answers) == ["0", "1"], done
    rank_0, stopped_by = answers["0"].split()
    assert stopped_by == "epochs"
    called = [line.split() for line in notes.read_text().splitlines()]
    assert {parent for parent, *_ in called} == {rank_0}, "in the process beside rank 0"
    assert {has_compiler for *_, has_compiler in called} == {"False"}, "its import takes a second"
    history = SavedRun(tmp_path / "run").history
    assert [int(version) for _, version, _ in called] == list(range(1, history.totals.updates + 1))
    scales = {each.step_scale for each in history.of(GradientArrived) if each.used and each.staleness}
    assert scales == ({own_code_script.HALF} if protocol == "own" else set())
