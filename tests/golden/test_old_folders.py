"""Folders that version 0.1 wrote (commit 697aa73): they are replayed and reported; a resume is refused in one line."""

import shutil
from pathlib import Path

import pytest

import paceline as pl
from paceline.recording.run_folder import SavedRun
from paceline.recording.schema import SCHEMA
from paceline.report.write import write_report
from paceline.run.plan_json import plan_of
from tiny_jobs import dataset, tiny_job

OLD_RUNS = Path(__file__).parent / "old_runs"
ALL = sorted(path.name for path in OLD_RUNS.iterdir())
WITH_CHECKPOINT = OLD_RUNS / "controllers_and_checkpoint"


@pytest.mark.parametrize("name", ALL)
def test_an_old_folder_is_replayed(name):
    assert pl.replay(OLD_RUNS / name).difference == ""


@pytest.mark.parametrize("name", ["controllers_and_checkpoint", "dc_s3gd"])
def test_an_old_folder_is_reported(name, tmp_path):
    shutil.copytree(OLD_RUNS / name, tmp_path / name)
    assert write_report([tmp_path / name]).stat().st_size > 10_000


def test_the_plan_of_an_old_folder_has_every_part():
    plan = plan_of(SavedRun(WITH_CHECKPOINT).configuration["plan"])
    policies = (pl.dbw().until(updates=4) >> pl.bsp().until(updates=7) + pl.elastic(window=1, consecutive=1)) >> (
        pl.asp() + pl.staleness_lr(C=0.01) + pl.momentum("1/n")
    )
    assert plan.in_full == policies.in_full
    [phase] = plan_of(SavedRun(OLD_RUNS / "dc_s3gd").configuration["plan"]).phases
    assert phase == pl.dc_s3gd()


def test_the_job_of_an_old_folder_has_the_current_class_names():
    configuration = SavedRun(WITH_CHECKPOINT).configuration
    assert configuration["schema"] == SCHEMA
    assert configuration["identity"]["schedule"].startswith("LinearSchedule(warm_up=Duration(unit='epochs', amount=1)")


def test_a_resume_from_an_old_checkpoint_is_refused_in_one_line(tmp_path):
    shutil.copytree(WITH_CHECKPOINT, tmp_path / "run")
    job = tiny_job(
        eval_data=dataset(),
        sampling="epoch",
        schedule=pl.LinearSchedule(
            warm_up=pl.Duration("epochs", 1), check_every="gradients=8", total=pl.Duration("epochs", 9)
        ),
    )
    plan = plan_of(SavedRun(WITH_CHECKPOINT).configuration["plan"])
    with pytest.raises(
        pl.UsageError, match="has schema 1, this version reads schema 2; resume the run with"
    ) as refused:
        pl.train(job, protocol=plan, cluster="3*exp(mean=1)", stop="updates=20", seed=3, resume=tmp_path / "run")
    assert "\n" not in str(refused.value)
