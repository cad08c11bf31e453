"""Folders with schema 2 (commit 8f0d1874) and schema 3 (commit ba3e50c9): they are replayed and reported."""

import shutil
from pathlib import Path

import pytest

import paceline as pl
from paceline.core.records import WorkerLost
from paceline.protocols.protocol import as_plan
from paceline.recording.run_folder import EVENTS, SavedRun
from paceline.recording.schema import SCHEMA
from paceline.report.write import write_report
from paceline.run.plan_json import plan_of

OLD_RUNS = Path(__file__).parent / "old_runs"
ALL = sorted(path.name for path in OLD_RUNS.iterdir())


@pytest.mark.parametrize("name", ALL)
def test_an_old_folder_is_replayed(name):
    assert pl.replay(OLD_RUNS / name).difference == ""


@pytest.mark.parametrize("name", ["controllers", "dc_s3gd"])
def test_an_old_folder_is_reported(name, tmp_path):
    shutil.copytree(OLD_RUNS / name, tmp_path / name)
    assert write_report([tmp_path / name]).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        (
            "controllers",
            pl.dbw().until(updates=4)
            >> pl.bsp().until(updates=7) + pl.elastic(window=1, consecutive=1)
            >> pl.asp() + pl.staleness_lr(C=0.01) + pl.momentum("1/n"),
        ),
        ("dc_s3gd", pl.dc_s3gd()),
    ],
    ids=["controllers", "dc_s3gd"],
)
def test_the_plan_of_an_old_folder_has_every_part(name, plan):
    configuration = SavedRun(OLD_RUNS / name).configuration
    assert configuration["schema"] == SCHEMA
    assert plan_of(configuration["plan"]).phases == as_plan(plan).phases


def test_a_loss_by_the_earlier_timeout_rule_is_replayed(tmp_path):
    """The earlier rule of real workers followed the medians of round trips alone."""
    [lost] = SavedRun(OLD_RUNS / "silent_worker").history.of(WorkerLost)
    assert lost.silent
    shutil.copytree(OLD_RUNS / "silent_worker", tmp_path / "run")
    log = tmp_path / "run" / EVENTS
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"worker_lost"' not in line))
    assert "the log has" in pl.replay(tmp_path / "run").difference
