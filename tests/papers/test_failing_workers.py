"""Simulated workers that fail at given times: who is left out, for how long, and what the others wait for."""

import json
from itertools import chain, islice, repeat
from math import inf
from statistics import fmean

import pytest

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Apply, Joined, Lost
from papers.ddp.failing_workers import FailingWorkers, Failure, Recovery, failures
from paths import ROOT

N = 4


def run(protocol, failed, recovery, updates=20):
    """Return the time and quorum of each update, and all losses and returns, where a gradient takes a second."""
    cluster = pl.Cluster(N, pl.timing.Deterministic(1.0))
    engine = FailingWorkers(cluster, 0, chain(failed, repeat(Failure(inf, 0))), recovery)
    applied, changes = [], []

    def observe(now, event, commands):
        if isinstance(event, Lost | Joined):
            changes.append((type(event).__name__, event.now, event.worker))
        applied.extend((engine.now, len(command.gradients)) for command in commands if isinstance(command, Apply))

    engine.loop().run(Coordinator(parse_plan(protocol), workers=N, stop=pl.Stop(updates=updates)), observe)
    return applied, changes


def test_a_failed_worker_is_left_out_until_it_is_back():
    applied, changes = run("bsp", [Failure(10.5, 2)], Recovery(away_s=5.0))
    assert changes == [("Lost", 10.5, 2), ("Joined", 15.5, 2)]
    assert [at_s for at_s, _ in applied] == list(range(1, 21))
    assert [k for _, k in applied] == [4] * 10 + [3] * 6 + [4] * 4


def test_a_worker_may_fail_again():
    _, changes = run("bsp", [Failure(4.5, 2), Failure(10.5, 2)], Recovery(away_s=5.0))
    assert [(name, worker) for name, _, worker in changes] == [("Lost", 2), ("Joined", 2)] * 2


def test_all_others_pause_at_a_failure_and_at_a_return():
    applied, changes = run("bsp", [Failure(10.5, 2)], Recovery(away_s=5.25, loss_s=3.0, return_s=2.0))
    assert changes == [("Lost", 13.5, 2), ("Joined", 17.75, 2)]
    assert [at_s for at_s, _ in applied][9:16] == [10, 13.5, 14.5, 15.5, 17.75, 18.75, 19.75]


def test_k_sync_does_not_wait_even_if_the_work_that_fails_would_be_interrupted():
    for worker in range(N):
        applied, changes = run("k_sync(k=3)", [Failure(10.5, worker)], Recovery(away_s=5.0))
        assert [name for name, _, _ in changes] == ["Lost", "Joined"]
        assert applied == [(update, 3) for update in range(1, 21)]


def test_a_failure_of_a_worker_that_is_away_is_that_of_the_next_one():
    failed = [Failure(10.5, 3), Failure(11.5, 3), Failure(12.5, 3)]
    applied, changes = run("bsp", failed, Recovery(away_s=5.0))
    assert [change for change in changes if change[0] == "Lost"] == [
        ("Lost", 10.5, 3),
        ("Lost", 11.5, 0),
        ("Lost", 12.5, 1),
    ]
    assert [k for _, k in applied][9:16] == [4, 3, 2, 1, 1, 1, 1]


def test_failures_are_seeded():
    def first(seed):
        return list(islice(failures(pl.timing.Exponential(3600.0), 64, seed), 10))

    assert first(3) == first(3) != first(4)


@pytest.mark.parametrize("between", [pl.timing.Exponential(3600.0), pl.timing.Uniform(2700.0, 4500.0)])
def test_failures_hit_all_workers_at_the_mean_rate(between):
    many = list(islice(failures(between, 64, 0), 4000))
    assert many[-1].at_s / len(many) == pytest.approx(3600.0, rel=0.05)
    assert fmean(failure.worker for failure in many) == pytest.approx(31.5, rel=0.05)
    assert {failure.worker for failure in many} == set(range(64))


def test_the_pages_show_the_kept_results():
    results = json.loads((ROOT / "benchmarks/results/failures.json").read_text())["results"]
    pages = [(ROOT / page).read_text() for page in ("docs/concepts/fault-tolerance.md", "benchmarks/README.md")]
    for profile in results.values():
        for name, hours in profile["hours_of_all_gradients"].items():
            low, high = hours["interval"]
            shown = f"{hours['mean']:.2f} ({low:.2f} to {high:.2f})"
            assert name == "no failure" or all(shown in page for page in pages), (name, shown)
