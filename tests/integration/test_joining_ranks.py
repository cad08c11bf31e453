"""Ranks with a parameter server, as threads: those that do not fit together, do not come, or come too late."""

import pytest
from torch import nn

import paceline as pl
from end_when import FOREVER
from paceline.engines.distributed.parameter_server.remote_workers import RemoteWorkers
from paceline.engines.distributed.rendezvous import first_workers, rendezvous
from rank_threads import ranks
from tiny_jobs import batch_norm_net, tiny_job


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 2, "job": tiny_job(batch_size=4)}, r"seed 1, now 2; .*batch_size 8, now 4"),
        ({"protocol": "asp"}, "protocol bsp, now asp"),
        ({"torchrun": {"wire": "bf16"}}, "wire float32, now bf16"),
        ({"torchrun": {"shards": 2}}, "shards 1, now 2"),
        ({"job": tiny_job(model=batch_norm_net)}, r"model .*1.weight not set.*"),
    ],
    ids=["seed and job", "protocol", "wire", "shards", "model"],
)
def test_ranks_that_do_not_agree_stop_with_the_difference(changes, said):
    with ranks(2, tiny_job(), protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.start(1, **changes)
        who = r"^(rank 0: )?worker 0 \(rank 1, .*, process \d+\) differs from rank 0"
        for rank in range(2):
            with pytest.raises(pl.UsageError, match=f"{who}: {said}"):
                job.end(rank)


def test_another_version_of_paceline_is_rejected(monkeypatch):
    with ranks(2, tiny_job(), protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.started(0)
        monkeypatch.setattr("paceline.run.session.versions", lambda: {"paceline": "0.0.1"})
        job.start(1)
        for rank in range(2):
            with pytest.raises(pl.UsageError, match=r"differs from rank 0: .*paceline.*0\.0\.1"):
                job.end(rank)


def test_a_rank_with_another_token_ends_and_the_right_one_is_awaited(monkeypatch):
    monkeypatch.setattr(rendezvous, "OTHER_SERVER_S", 0.05)
    with ranks(2, tiny_job(), protocol="bsp", stop="updates=5") as job:
        job.start(0)
        job.start(1, token="a guess")
        with pytest.raises(pl.UsageError, match=r"29500 is not of this job; set PACELINE_TOKEN to the same"):
            job.end(1)
        job.start(1)
        assert job.end(0).stopped_by == "updates"


def test_a_loss_that_is_no_scalar_stops_every_rank_with_one_line():
    job = tiny_job(loss=nn.CrossEntropyLoss(reduction="none"))
    with ranks(2, job, protocol="bsp", stop="updates=30") as started:
        started.start_all()
        for rank in range(2):
            with pytest.raises(pl.UsageError, match=r"the loss is not a scalar"):
                started.end(rank)


def test_a_rank_that_does_not_come_and_an_address_in_use(caplog, monkeypatch):
    monkeypatch.setattr(first_workers, "NOTICE_S", 0.1)
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.1)
    with ranks(2, tiny_job(), {"start_timeout_s": 0.3}, protocol="bsp", stop="updates=3") as job:
        job.start(0)
        with pytest.raises(pl.RunError, match=r"worker 0 did not join within start_timeout_s=0.3"):
            job.end(0)
        assert "waiting for rank 1 of 2, for up to start_timeout_s=0.3" in caplog.text
        job.start(1)
        with pytest.raises(pl.RunError, match=r"rank 0 could not be reached at 127.0.0.1:29500 within start_timeout"):
            job.end(1)
        assert "waiting for rank 0, for up to start_timeout_s=0.3" in caplog.text
    with ranks(2, tiny_job(), {"start_timeout_s": 1.5}, protocol="bsp", stop=FOREVER) as job:
        job.start_all()
        job.await_training()
        job.start(0)
        with pytest.raises(pl.UsageError, match=r"cannot listen on 127.0.0.1:29500 \(Address already in use\)"):
            job.end(0)


def test_a_worker_that_comes_back_after_the_end_leaves_with_status_0(caplog):
    with ranks(2, tiny_job(), protocol="asp", stop="updates=5") as job:
        announce = RemoteWorkers._send_end

        def come_back_after(workers, end):
            announce(workers, end)
            job.start(1)
            with pytest.raises(SystemExit) as left:
                job.end(1)
            assert left.value.code == 0

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(RemoteWorkers, "_send_end", come_back_after)
            job.start(1)
            assert job.serve().reason == "5 updates made"
    assert "the run has ended already (5 updates made): this process exits" in caplog.text
