"""Ranks of one host without a token: they find that of their own rank 0, whatever else lies in its folder."""

import os
from functools import partial

import pytest

import paceline as pl
from paceline.clusters.launch_env import LaunchEnv
from paceline.engines.distributed.rendezvous.token_file import create_token, token_path
from ranks import ranks
from tiny_jobs import tiny_job

pytestmark = pytest.mark.slow


def keep_tokens_in(folder):
    """Let this process keep tokens in a folder; it is called in each process first."""
    os.environ["XDG_RUNTIME_DIR"] = str(folder)


def token_folder(job, folder, monkeypatch):
    """Leave the token of an earlier run, as a killed one does, and return its place."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    settings = LaunchEnv.from_environment(job._environment(0))
    create_token(settings)
    return token_path(settings)


def test_two_runs_at_the_same_time_do_not_meet_and_old_tokens_are_replaced(tmp_path, monkeypatch):
    settings = {"protocol": "bsp", "stop": "updates=20"}
    with ranks(3, tiny_job(), **settings) as one, ranks(3, tiny_job(), **settings) as other:
        places = [token_folder(job, tmp_path, monkeypatch) for job in (one, other)]
        old = [place.read_text() for place in places]
        for rank in (1, 2, 0):  # rank 0 last, so that the others read the old tokens first
            for job in (one, other):
                job.start(rank, token="", prepare=partial(keep_tokens_in, tmp_path))
        one.await_training()
        assert len(set(places)) == 2
        for job in (one, other):
            assert job.end(0).reason == "20 updates made"
            assert [job.end(rank).reason for rank in (1, 2)] == ["20 updates made"] * 2
    assert not any(place.exists() for place in places)
    assert len(set(old)) == 2


def test_a_process_that_does_not_find_the_token_does_not_join(tmp_path):
    """A process of another user looks in another folder."""
    torchrun = {"start_timeout_s": 2.0}
    with ranks(2, tiny_job(), torchrun, protocol="bsp", stop="updates=20") as job:
        job.start(0, token="", prepare=partial(keep_tokens_in, tmp_path))
        (tmp_path / "other").mkdir()
        job.start(1, token="", prepare=partial(keep_tokens_in, tmp_path / "other"))
        with pytest.raises(pl.RunError, match="worker 0 did not join within start_timeout_s=2"):
            job.end(0)
        with pytest.raises(
            pl.RunError, match=r"within start_timeout_s=2: there is no .*/other/paceline/.*\.token: rank 0"
        ):
            job.end(1)


def test_a_rank_that_joins_later_finds_the_token(tmp_path):
    with ranks(3, tiny_job(), protocol="asp", stop="updates=200") as job:
        for rank in range(2):
            job.start(rank, token="", prepare=partial(keep_tokens_in, tmp_path))
        job.start(2, token="", prepare=partial(keep_tokens_in, tmp_path))
        job.await_training()
        job.processes[2].kill()
        job.processes[2].join()
        job.start(2, token="", prepare=partial(keep_tokens_in, tmp_path))
        assert job.end(0).reason == "200 updates made"
