"""Runs over several hosts, whose links are slow, far away or cut; each test asserts that its fault fired."""

import time

import pytest

import paceline as pl
from faults.hosts import hosts, need_hosts, ranks_on_hosts
from paceline.history import DecisionMade, GradientArrived, WorkerJoined, WorkerLost
from tiny_jobs import tiny_job

STEADY = pl.Deterministic(0.02)


@pytest.fixture(scope="module", autouse=True)
def _hosts_can_be_made():
    need_hosts()


def used_by(end, worker, since_s=0.0):
    return sum(r.used and r.worker == worker and r.now_s > since_s for r in end.of(GradientArrived))


def lost(end):
    return [(record.worker, record.reason) for record in end.of(WorkerLost)]


def test_a_run_over_two_hosts():
    with hosts(2) as made, ranks_on_hosts(made, [0, 0, 1], tiny_job(), protocol="k_sync(k=1)", stop="updates=200") as job:
        job.start_all()
        ends = [job.end(rank) for rank in range(3)]
    assert [end.reason for end in ends] == ["200 updates made"] * 3
    assert used_by(ends[0], 0) > 0
    assert used_by(ends[0], 1) > 0
