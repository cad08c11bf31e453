import pytest

import paceline as pl
from paceline.core.records import DecisionMade
from paceline.recording.run_folder import SavedRun
from paceline.report.curves import RATES, groups, panels
from paceline.report.run_data import read_run
from selections import parametrize_few
from tiny_jobs import tiny_job


def read(folder, lr_rule):
    job = tiny_job(lr_rule=lr_rule)
    pl.train(job, protocol="asp", cluster="4*exp(mean=1)", stop="gradients=120", out=folder)
    return read_run(SavedRun(folder), "run")


@parametrize_few("axis", ["time", "updates", "workload"], keep=1)
def test_the_rate_and_phi_have_charts(axis, tmp_path):
    run = read(tmp_path / "run", "noise")
    decisions = [each for each in run.run.history.of(DecisionMade) if each.kind == "learning_rate"]
    [group] = groups([run])
    for name in RATES:
        line = group.lines[axis][name]
        assert list(line.mean[:-1]) == pytest.approx([each.numbers[name] for each in decisions])
        assert line.mean[-1] == line.mean[-2]
    ends = {"time": run.end_s, "updates": 120, "workload": 120}
    assert line.x[-1] == pytest.approx(ends[axis])
    assert list(panels([group])) == ["loss", "scale", "phi", "k"]


@pytest.mark.slow
def test_other_rules_have_none(tmp_path):
    [group] = groups([read(tmp_path / "run", "constant")])
    assert list(panels([group])) == ["loss", "k"]
    assert not set(RATES) & set(group.lines["time"])
