"""The reproduction of Sync-Switch: that its settings are the paper's, what it predicts, and that it runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.clusters.timing.slowdowns import SlownessProfile
from paceline.protocols.plan_checks import checked_plan
from papers.sync_switch import draw, jobs, run, table
from papers.sync_switch.predicted import Workers, done, theirs_s, when
from papers.sync_switch.settings import (
    FIGURES,
    ONE,
    SETUP_1,
    SETUPS,
    SMALL,
    SMALL_16,
    TWO,
    Series,
    measured_cluster,
    slowed,
    switch,
)
from papers.sync_switch.training import Run, lines_of, runs
from papers.tasks import Where
from selections import parametrize_few
from tiny_data import write_images

SAMPLES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_images(folder, SAMPLES)
    jobs._mnist.cache_clear()
    jobs._cifar10.cache_clear()
    jobs._cifar100.cache_clear()
    return folder


# --- the configurations are what the paper says ---------------------------------------------------------------


def test_set_ups_match_the_paper():
    told = {
        name: (setup.job, setup.cluster.n, setup.workload, setup.batch_size, setup.lr, percent)
        for name, (setup, percent) in SETUPS.items()
    }
    assert told == {
        "set-up 1": ("cifar10-resnet32", 8, 64_000, 128, 0.1, 6.25),
        "set-up 2": ("cifar100-resnet50", 8, 64_000, 128, 0.1, 12.5),
        "set-up 3": ("cifar10-resnet32", 16, 64_000, 128, 0.1, 50),
    }


def test_a_job_steps_with_n_times_the_rate_under_bsp_and_decays_it_by_workload(folder):
    job = jobs.make_job(SMALL, lr=0.1, batch_size=4, workload=64_000, folder=folder)
    assert [job.learning_rate.scale(k, n=8) for k in (8, 1)] == [8, 1]
    model = job.build_model(0)
    optimizer = job.optimizer(model.parameters())
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.1, 0.9)
    [factor] = job.scheduler(optimizer).lr_lambdas
    assert [factor(g) for g in (0, 31_999, 32_000, 47_999, 48_000, 64_000)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )


def test_the_small_version_has_the_requested_stragglers():
    assert (SMALL.cluster.n, SMALL_16.cluster.n) == (8, 16)
    slow = {
        len(stragglers): [
            np.mean([[timeline.duration_s(1e-6, t) > 4e-6] for t in np.arange(0, 1000, 0.5)])
            for each in stragglers
            for timeline in [SlownessProfile([each])]
        ]
        for stragglers in (ONE, TWO)
    }
    assert slow == {1: [0.2], 2: [0.5, 0.5]}


@pytest.mark.parametrize("figure", FIGURES)
def test_every_panel_has_runnable_series_with_distinct_names(figure):
    for case in FIGURES[figure].cases.values():
        names = [series.name for series in case.series]
        assert len(set(names)) == len(names)
        assert case.reference in names
        for series in case.series:
            plan = checked_plan(parse_plan(series.protocol), case.setup.cluster.n, total=64_000, per_epoch=390)
            case.setup.cluster.check_plan(plan)


def test_figures_that_show_the_same_runs_run_them_once():
    keys = {figure: {json.dumps(each.asked()) for each in runs(figure, 1, "^small")} for figure in FIGURES}
    assert keys["11"] < keys["5"]
    assert keys["10"] < keys["5"] | keys["sixteen"]


def test_larger_minibatches_take_longer_but_not_in_proportion_and_there_are_fewer_of_them():
    asked = [Run(SMALL, Series(switch(25), batch_size=size), 0).asked() for size in (16, None, 64)]
    assert [each["workload"] for each in asked] == [16_000, 8000, 4000]
    mean_s = [1 / SMALL.cluster_for(size).speed_of(0) for size in (16, 32, 64)]
    assert mean_s == pytest.approx([0.75, 1, 1.5])


# --- how long a plan takes --------------------------------------------------------------------------------------


@given(t_s=st.floats(0, 1000), work_s=st.floats(0, 1000), at_s=st.floats(0, 200), slowdown=st.floats(1, 10))
@settings(deadline=None)  # a busy machine is not a failure
def test_the_work_of_a_straggler_follows_its_slowness_profile(t_s, work_s, at_s, slowdown):
    straggler = pl.timing.Periodic(on_s=30, every_s=70, slowdown=slowdown, workers=(0,), at_s=at_s)
    took_s = SlownessProfile([straggler]).duration_s(work_s, t_s)
    assert float(when(done(t_s, straggler) + work_s, straggler)) - t_s == pytest.approx(took_s, abs=1e-6)


@pytest.mark.slow
@parametrize_few("stragglers", [(), ONE, TWO], keep=2, ids=["none", "one", "two"])
@parametrize_few("share", [0.25, 1.0, 0.0], keep=1)
def test_the_predicted_time_of_a_plan_matches_the_simulator(stragglers, share):
    cluster, workload = slowed(SMALL, *stragglers).cluster, 4000
    bsp = round(share * workload)
    plan = {1.0: "bsp", 0.0: "asp"}.get(share, f"bsp@gradients={bsp} >> asp")
    updates = bsp // 8 + workload - bsp
    simulated = [pl.simulate(plan, cluster, updates=updates, seed=seed).time_s for seed in range(3)]
    assert Workers.of(cluster).played_s(workload, share).mean() == pytest.approx(np.mean(simulated), rel=0.02)


@pytest.mark.parametrize("stragglers", [(), ONE], ids=["none", "one"])
@parametrize_few("share", [0.25, 1.0, 0.0], keep=1)
def test_the_predicted_time_of_a_plan_matches_the_closed_form(stragglers, share):
    workers = Workers.of(slowed(SMALL, *stragglers).cluster)
    assert workers.plan_s(8000, share) == pytest.approx(workers.played_s(8000, share).mean(), rel=0.01)


def test_excluding_stragglers_is_bsp_of_the_remaining_workers():
    """With one straggler for a fifth of the time: a fifth of the time at the pace of 7 workers."""
    workers = Workers.of(slowed(SMALL, *ONE).cluster)
    pace = sum(share * n / Workers(n, 0.5, 0.5).bsp_update_s() for share, n in ((0.8, 8), (0.2, 7)))
    assert workers.ideal_s(8000, 1.0) == pytest.approx(8000 / pace + workers.asp_s(0), rel=1e-3)
    assert Workers(8, 0.5, 0.5).ideal_s(8000, 0.25) == Workers(8, 0.5, 0.5).plan_s(8000, 0.25)


def test_an_update_of_bsp_takes_the_shift_and_the_largest_of_n_exponential_times():
    assert Workers(8, 0.5, 0.5).bsp_update_s() == pytest.approx(0.5 + 0.5 * 2.717857, rel=1e-6)


@pytest.mark.parametrize(("name", "theirs"), [("set-up 1", 5.13), ("set-up 2", 1.66), ("set-up 3", 1.87)])
def test_speed_ups_of_the_paper_follow_from_its_measured_rates(name, theirs):
    setup, percent = SETUPS[name]
    bsp_s, plan_s = (theirs_s(setup.measured, setup.cluster.n, 64_000, share) for share in (1, percent / 100))
    assert bsp_s / plan_s == pytest.approx(theirs, rel=0.04)


def test_measured_workers_make_steps_at_the_measured_pace_with_the_measured_spread():
    measured, rng = SETUP_1.measured, np.random.default_rng(0)
    law = measured_cluster(8, measured).distribution_of(0)
    ends_s = np.sort(law.quantile(rng.random((8, 4000))).cumsum(axis=1), axis=None)[: 8 * 3000]
    paces_s = np.diff(ends_s[::100]) / 100
    assert paces_s.mean() == pytest.approx(measured.asp_s, rel=0.02)
    assert paces_s.std() == pytest.approx(measured.asp_std_s, rel=0.2)


# --- from the command to the drawings ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_figure_is_run_once_tabulated_and_drawn(folder, tmp_path):
    asked = ["--figure", "straggler", "--figure", "11", "--only", "^small/(bsp|asp|bsp@25% >> asp)$"]
    asked += ["--folder", str(folder), "--seeds", "1", "--updates", "3", "--out", str(tmp_path)]
    run.main(asked)
    before = (tmp_path / "training.jsonl").read_text()
    assert len(before.splitlines()) == 6
    assert str(folder) not in before
    run.main(asked)
    assert (tmp_path / "training.jsonl").read_text() == before
    table.main(tmp_path)
    assert "## straggler, small" in (tmp_path / "tables.md").read_text()
    draw.main(tmp_path, tmp_path / "figures")
    assert {"figure11.svg", "figurestraggler.svg"} <= {path.name for path in (tmp_path / "figures").iterdir()}


@pytest.mark.slow
@parametrize_few("name", ["set-up 3", "set-up 1", "set-up 2"], keep=1)
def test_the_papers_own_jobs_run(folder, name):
    """On two workers, with minibatches of two samples, and as many of them as make an update of BSP and two of ASP."""
    setup, _ = SETUPS[name]
    tiny = replace(setup, cluster=replace(setup.cluster, n=2), batch_size=2, workload=4, evaluations=1)
    line = Run(tiny, Series(switch(50)), seed=0).carry_out(Where(folder))
    assert (line["updates"], line["stopped_by"]) == (3, "gradients")
    assert [kind for _, _, kind, _ in line["decisions"]] == ["protocol", "protocol"]


def test_the_time_to_an_accuracy_is_its_first_measurement():
    line = {"test_s": [1.0, 2.0, 3.0], "test_accuracy": [0.5, None, 0.9]}
    assert table.time_to(line, 0.8) == 3
    assert np.isnan(table.time_to(line, 0.95))


def test_runs_of_another_set_up_are_not_used_for_a_panel():
    lines = [{"asked": Run(SMALL, Series("bsp"), 0).asked()}, {"asked": Run(SMALL_16, Series("bsp"), 0).asked()}]
    assert lines_of(SMALL, [Series("bsp")], lines) == lines[:1]


def test_a_run_shared_by_two_panels_runs_once(folder, tmp_path):
    asked = ["--figure", "5", "--only", "^small, .*/(bsp|asp)$", "--folder", str(folder), "--seeds", "1"]
    run.main([*asked, "--updates", "1", "--out", str(tmp_path)])
    lines = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert sorted(line["asked"]["series"] for line in lines) == ["asp", "bsp"]
