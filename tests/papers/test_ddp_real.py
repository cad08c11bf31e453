"""Runs of the comparison with DDP on real processes: what the ranks do, and how their seconds are compared."""

from dataclasses import replace
from math import inf

import pytest
import torch

import paceline as pl
from papers.ddp import real, table
from papers.ddp.paceline_ranks import Server
from papers.ddp.patterns import PATTERNS
from papers.ddp.real import COMPUTING_S, Real, Snapshots, compared, slowed
from papers.ddp.settings import AUTO, DDP, MARGIN, WITHOUT_SLOW
from papers.ddp.training import evaluations
from papers.tasks import Where
from tiny_data import write_images

UPDATES = 8


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path, 2_000)
    return tmp_path


def short(contender):
    """Return a task of two workers with an evaluation after every 8 gradients, and 0.1 s for one of the slow worker."""
    return Real("half", contender, seed=0, n=2, gradients=320, slower=0.5)


def slept_s(task, worker, draw):
    return task.sleeping.round_trips(task.seed).times(worker, draw, 0.0).compute_s


@pytest.mark.slow
def test_ranks_of_ddp_sleep_and_make_the_updates_of_the_simulation(folder):
    task = short(DDP)
    line = task.carry_out(Where(folder, updates=UPDATES))
    evaluated, simulated = line["real_evaluated"], line["simulated_evaluated"]
    assert [each["updates"] for each in evaluated] == [4, 8]
    assert evaluated[1]["loss"] < evaluated[0]["loss"]
    for ours, theirs in zip(evaluated, simulated, strict=True):  # equal but for rounding, which grows
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    for each in evaluated:
        draws = range(1, each["updates"] + 1)
        assert each["time_s"] >= sum(max(slept_s(task, worker, draw) for worker in range(2)) for draw in draws) - 1e-4
    assert line["real_s"] >= evaluated[-1]["time_s"]
    assert line["real_computing_s"] > 0


@pytest.mark.slow
def test_ranks_of_paceline_sleep_and_do_not_wait_for_the_slow_worker(folder):
    task = replace(short("k_sync(k=n-1)"), slower=1.0)
    line = task.carry_out(Where(folder, updates=3 * UPDATES))
    assert [each["updates"] for each in line["real_evaluated"]] == [8, 16, 24]
    assert line["real_evaluated"][-1]["loss"] < line["real_evaluated"][0]["loss"]
    assert line["real_mean_k"] == 1.0
    fast_s, slow_s = (sum(slept_s(task, worker, draw) for draw in range(1, 25)) for worker in range(2))
    assert fast_s / 2 < line["real_s"] < slow_s  # two fast workers would take half


@pytest.mark.slow
def test_snapshots_of_the_server_have_the_losses_of_a_run_with_evaluations(folder):
    task = short("k_sync(k=n-1)")
    job, cluster = task.job(folder), pl.Cluster(2, PATTERNS["half"].timing)
    server = Server(job, 2)
    task.train(replace(job, optimizer=server.make_optimizer, eval_data=None), cluster, 4, callbacks=[server])
    expected = evaluations(task.train(job, cluster, 4, evaluate_every=pl.plans.Duration("gradients", 2)))
    assert server.snapshots.evaluated(job, task.seed) == expected
    assert [each["updates"] for each in expected] == [2, 4]


def test_a_snapshot_is_due_at_or_after_each_multiple():
    snapshots = Snapshots(every=4)
    for update, gradients in enumerate((3, 6, 9, 21, 22, 24), start=1):
        snapshots.on_update(update, gradients, 0.0, [torch.zeros(1)])
    assert [at["gradients"] for at, _ in snapshots._kept] == [6, 9, 21, 24]


def test_sleeping_and_computing_take_the_seconds_of_the_pattern():
    task = Real("rotating", WITHOUT_SLOW, seed=3, slower=2.0)
    times, sleeps = (
        cluster.round_trips(3) for cluster in (PATTERNS["rotating"].cluster(4, without_slow=True), task.sleeping)
    )
    for worker, draw, start_s in ((0, 1, 0.0), (1, 5, 0.7), (2, 70, 4.1)):
        drawn_s = times.times(worker, draw, start_s).compute_s
        assert sleeps.times(worker, draw, 2 * start_s).compute_s == pytest.approx(2 * drawn_s - COMPUTING_S)
    assert task.sleeping.n == 3


def test_a_worker_does_not_sleep_if_computing_takes_all_of_its_time():
    assert replace(short(DDP).sleeping, computing_s=1.0).round_trips(0).times(0, 1, 0.0).compute_s == 0.0


def test_a_slowed_cluster_takes_longer_by_the_factor():
    for pattern in real.REAL_PATTERNS:
        cluster = PATTERNS[pattern].cluster(4)
        simulated = (pl.simulate("k_sync(k=3)", each, updates=200, seed=1) for each in (cluster, slowed(cluster, 2.5)))
        normal_s, slow_s = (each.time_s for each in simulated)
        assert slow_s == pytest.approx(2.5 * normal_s)


def line_of(contender, real_s, simulated_s, real_losses, simulated_losses):
    runs = {"real": (real_s, real_losses), "simulated": (simulated_s, simulated_losses)}
    line = {"asked": {"pattern": "half", "series": contender, "seed": 0}}
    for kind, (run_s, losses) in runs.items():
        evaluated = [{"time_s": run_s * k / len(losses), "loss": loss} for k, loss in enumerate(losses, start=1)]
        line |= {f"{kind}_s": run_s, f"{kind}_evaluated": evaluated}
    return line


def test_seconds_are_compared_with_those_of_ddp():
    ddp = line_of(DDP, 8.0, 4.0, [1.0, 0.5], [0.9, 0.5 + MARGIN / 2, 0.5, 0.5])
    ours = line_of(AUTO, 4.0, 3.0, [0.5 + MARGIN, 0.4], [0.6, 0.6, 0.6])
    alone = line_of(AUTO, 4.0, 3.0, [0.5], [0.5])
    alone["asked"]["seed"] = 1
    found = compared([ours, ddp, alone])
    assert list(found) == [("half", AUTO, 0)]
    assert found["half", AUTO, 0].real == pytest.approx((4.0 / 8.0, 2.0 / 8.0))
    assert list(table.check([ours, ddp, alone]))[-2] == "| half | auto | 1 | 0.500 | 0.750 | -33.3 % |"
    assert list(table.check([ours])) == []
    assert found["half", AUTO, 0].simulated == pytest.approx((3.0 / 4.0, inf))


def test_tasks_come_seed_by_seed_and_can_be_chosen():
    assert [task.seed for task in real.tasks(None, "")] == [0] * 12 + [1] * 12 + [2] * 12
    [chosen] = real.tasks(1, "/rotating/auto")
    assert chosen == Real("rotating", AUTO, 0)
    assert len({str(task.asked()) for task in real.tasks(None, "")}) == 36
