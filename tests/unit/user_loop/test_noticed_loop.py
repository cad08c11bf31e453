"""Spot notices of attached loops: a rank hands in its gradient and leaves, and at rank 0 the server ends the run."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import make_parts, step
from paceline.core.records import GradientArrived, WorkerLost
from paceline.engines import notice_watch
from paceline.engines.distributed.parameter_server.worker_process import WorkerProcess
from rank_threads import LIMIT_S


class NoticedThreads(AttachedThreads):
    """Attached loops, of which the processes with these ranks of the run watch for a file."""

    def watch(self, place, *ranks):
        self._notices = dict.fromkeys(ranks, str(place))
        return self

    def cluster(self, rank):
        return replace(super().cluster(rank), notice=self._notices.get(rank))


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(notice_watch, "POLL_S", 0.005)


def test_a_rank_with_a_notice_hands_in_its_gradient_and_leaves_the_others(network, data, monkeypatch, tmp_path):
    has_notice, leave = threading.Event(), WorkerProcess._leave

    def noticed(worker, reason):
        leave(worker, reason)
        has_notice.set()

    def loop(run, model, optimizer):
        steps = 0
        for _ in run.epochs(3):
            for batch in run.loader:
                if model is ranks.parts[1][0] and steps == 2:
                    place.touch()
                assert steps < 2 or has_notice.wait(LIMIT_S)
                step(model, optimizer, [batch])
                steps += 1
        return run.stopped_by

    monkeypatch.setattr(WorkerProcess, "_leave", noticed)
    place = tmp_path / "preempt"
    ranks = NoticedThreads(2, make_parts(network, data), "bsp").watch(place, 2)
    first, second = ranks.run(loop)
    assert first == "epochs"
    assert isinstance(second, SystemExit)
    history = ranks.server.result.history
    assert [(lost.worker, lost.reason) for lost in history.of(WorkerLost)] == [(1, f"{place} exists")]
    assert len([arrived for arrived in history.of(GradientArrived) if arrived.worker == 1 and arrived.used]) == 3


def test_a_notice_at_the_server_ends_the_run_of_all_ranks(network, data, tmp_path):
    def loop(run, model, optimizer):
        for _ in run.epochs(10_000):
            for batch in run.loader:
                step(model, optimizer, [batch])
                place.touch()
        return run.stopped_by

    place = tmp_path / "preempt"
    ranks = NoticedThreads(2, make_parts(network, data), "bsp", returns=True).watch(place, 0)
    assert ranks.run(loop) == ["interrupted", "interrupted"]


@pytest.mark.parametrize(("rank", "notice"), [("0", None), ("1", "aws")])
def test_beside_the_server_the_worker_watches_for_no_notice(rank, notice, monkeypatch):
    variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**variables, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.attach(model, optimizer, loader, protocol="bsp", cluster="torchrun(notice=aws)") as run:
        assert run._part.config(pl.Stop(updates=1)).cluster.notice == notice
