"""Workers whose gradients are never used: reported once, or released on request."""

import pytest

import paceline as pl
from driven_controller import Driven
from paceline.core.records import DecisionMade, WorkerLost
from tiny_jobs import tiny_job

SLOW = pl.Cluster(4, timing=[*[pl.timing.Exponential(1.0)] * 3, pl.timing.Deterministic(200.0)])


def idle_decisions(protocol):
    result = pl.train(tiny_job(), protocol=protocol, cluster=SLOW, stop="seconds=450", worker_timeout_s=1e9)
    return [(r.kind, r.worker) for r in result.history.of(DecisionMade) if r.kind in ("idle", "set_aside")]


def test_an_unused_worker_is_reported_once():
    assert idle_decisions("b_dbw") == [("idle", 3)]


@pytest.mark.slow
def test_an_unused_worker_is_released_on_request():
    assert idle_decisions("b_dbw(release_idle=true)") == [("set_aside", 3)]


def test_a_lost_worker_is_not_reported_as_released():
    phase = pl.bsp().controlled_by(pl.controllers.IdleWorkers(after=10, release=True))
    cluster = pl.Cluster(3, pl.timing.Deterministic(1.0), faults=[pl.Fault(worker=2, draw=3)])
    result = pl.train(tiny_job(), protocol=phase, cluster=cluster, stop="updates=30", worker_timeout_s=3.0)
    kinds = [record.kind for record in result.history.of(DecisionMade) if record.worker == 2]
    assert kinds == []
    assert [record.worker for record in result.history.of(WorkerLost)] == [2]


def test_the_last_workers_are_never_released():
    driven = Driven(pl.controllers.IdleWorkers(after=5, release=True), 2)
    driven.ask("open", workers=[0, 1])
    driven.version = 5
    driven.ask("open", workers=[0, 1])
    assert [type(action) for action in driven.actions] == [pl.controllers.Exclude, pl.controllers.Note]


def test_a_worker_that_rejoins_starts_a_new_count():
    driven = Driven(pl.controllers.IdleWorkers(after=5), 2)
    for version, workers in ((0, [0, 1]), (3, [0]), (4, [0, 1])):
        driven.version = version
        driven.ask("open", workers=workers)
    driven.version = 5
    driven.ask("open", workers=[0, 1])
    assert [action.worker for action in driven.actions] == [0]
